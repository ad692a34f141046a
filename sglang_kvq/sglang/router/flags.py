"""The ``--episodic-*`` flags, for conversations that are longer than one request may read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import ALIASES, EPISODES, POLICIES, EpisodicConfig

#: Flag (as an attribute name) and the ``EpisodicConfig`` field that it sets.
FIELDS = {
    "episodic_policy": "policy",
    "episodic_budget": "budget",
    "episodic_block": "block",
    "episodic_segment": "segment",
    "episodic_episodes": "episodes",
    "episodic_embedder": "embedder",
    "episodic_embedder_device": "embedder_device",
    "episodic_sessions": "sessions",
    "episodic_idle": "idle_seconds",
    "episodic_state_memory": "state_memory",
    "episodic_tenant_share": "tenant_share",
    "episodic_tenant_header": "tenant_header",
    "episodic_session_header": "session_header",
}
_DEFAULTS = {field.name: field.default for field in fields(EpisodicConfig)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser."""
    group = parser.add_argument_group("Sessions longer than what a request reads (sglang-kvq)")

    def add(flag: str, help: str, **options: Any) -> None:
        default = _DEFAULTS[FIELDS[flag[2:].replace("-", "_")]]
        said = (
            ""
            if default in (None, "") or "choices" in options
            else f" Default: {default if isinstance(default, str) else format(default, 'g')}."
        )
        # With None, ``parse`` can tell a missing flag from a typed default. EpisodicConfig has the defaults.
        group.add_argument(flag, default=None, help=help + said, **options)

    add(
        "--episodic-policy",
        "What a request with a session id reads of a conversation longer than the budget. retrieve (formerly late): "
        "the pages nearest to its question, beside sinks and the most recent ones. epicache: the episode nearest to "
        "it, of which each KV head keeps tokens of its own. Default: off.",
        type=lambda name: ALIASES.get(name, name),
        choices=("off", *POLICIES),
    )
    add(
        "--episodic-budget",
        f"Tokens that such a request reads at most when its answer begins; a multiple of {PAGE_SIZE}.",
        type=int,
        metavar="TOKENS",
    )
    add(
        "--episodic-block",
        "Tokens at the end of a prompt that may be computed without the whole history; longer ones are computed with "
        f"it first. A multiple of {PAGE_SIZE}.",
        type=int,
        metavar="TOKENS",
    )
    add(
        "--episodic-segment",
        "Tokens of a text window that a question is compared with; one window begins at each page. A multiple of "
        f"{PAGE_SIZE}.",
        type=int,
        metavar="TOKENS",
    )
    add(
        "--episodic-episodes",
        f"Clusters of a conversation (epicache). Default: {EPISODES}.",
        type=int,
        metavar="N",
    )
    add(
        "--episodic-embedder",
        "Folder of the sentence-transformers model that compares questions with segments.",
        metavar="FOLDER",
    )
    add(
        "--episodic-embedder-device",
        "Where that model runs: cpu, cuda, cuda:1. On a GPU it takes memory outside --mem-fraction-static, and long "
        "conversations are embedded faster.",
        metavar="DEVICE",
    )
    add(
        "--episodic-sessions",
        "Maximum number of remembered sessions. If there are more, the tenant with the most loses the one used longest "
        "ago.",
        type=int,
        metavar="N",
    )
    add(
        "--episodic-idle",
        "Forget a session that was idle for this time; 0 for never.",
        type=float,
        metavar="SECONDS",
    )
    add(
        "--episodic-state-memory",
        "MiB that embeddings, word indexes, tokens and episodes of all sessions take at most, in the process that "
        "serves HTTP. If they take more, the tenant with the most loses the sessions used longest ago.",
        type=int,
        metavar="MIB",
    )
    add(
        "--episodic-tenant-share",
        "Share of --episodic-sessions and --episodic-state-memory that one tenant may hold.",
        type=float,
        metavar="SHARE",
    )
    add(
        "--episodic-tenant-header",
        "Header in which a trusted gateway says whose request it is; sessions of two values never meet. Without it the "
        "API key alone tells tenants apart.",
        metavar="NAME",
    )
    add(
        "--episodic-session-header",
        "Header that names a request's session. Behind SGLang's router X-SMG-Routing-Key: it passes no other name on.",
        metavar="NAME",
    )


def parse(values: Mapping[str, Any]) -> EpisodicConfig | None:
    """Returns the configuration that the flags give; None for ``--episodic-policy off``, the default.

    Raises:
        KVQuantError: a value is out of range, or a flag is given without ``--episodic-policy``.
    """
    given = {field: values[flag] for flag, field in FIELDS.items() if values.get(flag) is not None}
    if given.pop("policy", "off") == "off":
        for flag, field in FIELDS.items():
            if field in given:
                raise KVQuantError(
                    f"--{flag.replace('_', '-')} has no effect without --episodic-policy. Add --episodic-policy "
                    "retrieve or leave it out."
                )
        return None
    return EpisodicConfig(policy=values["episodic_policy"], **given)
