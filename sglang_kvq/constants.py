"""Numbers that torch code, kernels and the configuration share. This module imports nothing."""

from __future__ import annotations

#: Tokens per page. It is fixed, because page formats, kernels and both pools are built for this size.
PAGE_SIZE = 64
#: Values of head_dim that the page formats and kernels support.
HEAD_DIMS = (64, 96, 128, 256)

#: Kinds of events that a plan applies: pages freed, BF16 pages moved to other pages, rows given back, ids allocated.
EVENT_FREE, EVENT_MOVE, EVENT_ROWS, EVENT_ALLOCATE = range(4)
#: Keys of first-token entries, in order of reuse: free entries, then entries of pages that still have BF16 copies. The
#: keys of other entries are larger and grow with the step in which their pages lost the BF16 copy.
ENTRY_FREE, ENTRY_UNUSED = 0, 1
#: Key of a slot or entry that must not be taken.
NEVER = 1 << 62
