"""An SGLang plugin for tests: logs each prefill batch that has decoding requests."""

from __future__ import annotations

import logging


def install() -> None:
    from sglang_kvq.sglang.attention.backend import KVQuantBackend

    plan = KVQuantBackend._plan_extend

    def planned(self, batch) -> None:
        plan(self, batch)
        if self.decoding is not None:
            logging.getLogger("sglang_kvq").info(
                "mixed batch: %d prefills, %d decoding", len(self.batch.new_lens), len(self.decoding.rows)
            )

    KVQuantBackend._plan_extend = planned
