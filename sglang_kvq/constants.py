"""Numbers that several layers share: torch code, kernels and the configuration. This module imports nothing."""

from __future__ import annotations

#: Tokens per page. Fixed: page formats, kernels and both pools are laid out for it.
PAGE_SIZE = 64
#: head_dim values the page formats and kernels support.
HEAD_DIMS = (64, 96, 128, 256)

#: Kinds of events that a plan applies: pages freed, BF16 pages moved to other pages, rows given back, ids allocated.
EVENT_FREE, EVENT_MOVE, EVENT_ROWS, EVENT_ALLOCATE = range(4)
#: Keys of entries for first tokens, in order of reuse: free ones, those whose page still has its BF16 copy, then by
#: age.
ENTRY_FREE, ENTRY_UNUSED = 0, 1
#: Key of a slot or entry that must not be taken.
NEVER = 1 << 62
