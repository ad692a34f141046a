"""A plugin of the tests: Mooncake on a CPU. SGLang's shortcut for page ids pins memory and needs CUDA's events."""

import sys


def install() -> None:
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.disaggregation.mooncake import conn

        conn.MooncakeKVSender.supports_host_tensor_indices = False
