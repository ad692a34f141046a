"""A plugin of the tests: Mooncake on a CPU, and a server that retracts as if memory had run out.

SGLang's shortcut for page ids pins memory and needs CUDA's events. Its knob for retraction is read once, when it is
imported, and servers of tests are forked from a process that has imported it.
"""

import os
import sys


def install() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.disaggregation.mooncake import conn
    from sglang.srt.managers import scheduler

    conn.MooncakeKVSender.supports_host_tensor_indices = False
    if steps := os.environ.get("KVQ_TEST_RETRACT"):
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, int(steps)
