"""Logs the errors that plans count on the device, while the server is busy."""

from __future__ import annotations

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.transfer import LateCopy
from sglang_kvq.sglang.runtime import logger

#: Least time between two copies of the count on a GPU. The next batch waits for the host while it begins a copy or
#: looks whether one has arrived.
_SECONDS = 1.0


class ErrorWatch:
    """Logs the first error of a worker's tiers, once.

    A plan cannot stop its batch, so it counts invalid states on the device (``TierManager.errors``). The count is
    copied in the background, and no step waits for it. On a GPU it is copied at most once a second, and the next batch,
    or an idle server, logs what has arrived.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._errors = LateCopy(lambda: tiers.errors.view(1), tiers.pool.device, _SECONDS)
        self._logged = False

    def ask(self) -> None:
        """Requests the count after the work launched so far, unless it was requested less than a second ago."""
        if not self._logged:
            self._errors.ask()

    def look(self) -> None:
        """Logs an error if the requested count has arrived and is not zero."""
        found = self._errors.arrived()
        if found and found[0]:
            self._logged = True
            logger.error(
                "kv-quant: the cache counted errors on the device, %d so far: a window page without a BF16 copy, a "
                "page without a record, or an index out of range. Answers may be wrong from now on. Restart the server "
                "and report this with its log.",
                found[0],
            )
