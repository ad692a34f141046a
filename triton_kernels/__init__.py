"""GPU kernels; imported as ``sglang_kvq.kernels``."""

if __name__ == "triton_kernels":
    # A server started in the repository's root has this folder on sys.path, before the module of the same
    # name that SGLang's kernels wheel installs. Stand aside: resolve submodules in that one.
    from pkgutil import extend_path

    __path__ = [path for path in extend_path(__path__, __name__) if path not in __path__]
