# Appended by sglang-kvq's launch/cpu_env.py. This wheel was built for CUDA, so on a CPU torch its operators did
# not load; the next module of torchvision registers shapes for two of them all the same, which needs schemas.
if not _has_ops():  # noqa: F821
    _schemas = torch.library.Library("torchvision", "DEF")  # noqa: F821
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
