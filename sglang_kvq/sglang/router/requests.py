"""Requests of sessions: checks them, builds the inner requests for them, and converts answers back."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import FOLD, PREFIX, SELECTION, Selection
from sglang_kvq.sessions.planning import Plan
from sglang_kvq.sessions.session import Namespace

#: ``io_struct.GenerateReqInput``, ``fastapi.Request``.
GenerateRequest: TypeAlias = Any
HTTPRequest: TypeAlias = Any
#: One chunk of an answer.
Output: TypeAlias = dict[str, Any]

#: Entries of ``custom_params`` that only the router may set, and the prefix of namespaces that only it may use.
OURS = {FOLD, PREFIX, SELECTION}
NAME_PREFIX = "kvq-"

#: Tokens that are converted in one piece. Other requests wait meanwhile, for half a millisecond.
TOKENS_AT_ONCE = 1 << 15

#: Maximum number of characters in a session id.
LONGEST_ID = 256

#: Fields that a session's request may not set, and why.
_REFUSED = {
    "session_params": "sessions of SGLang keep tokens that the client does not send. Send the whole conversation",
    "input_embeds": "a conversation is compared and found by its tokens. Send text or input_ids",
    "image_data": "the tokens of images do not say what is in them. Leave out the session id",
    "video_data": "the tokens of videos do not say what is in them. Leave out the session id",
    "audio_data": "the tokens of audio do not say what is in it. Leave out the session id",
    "lora_path": "pages of an adapter's cache cannot be chosen. Leave out the session id",
    "positional_embed_overrides": "its positions would refer to other tokens. Leave out the session id",
    "multi_item_delimiter_indices": "its positions would refer to other tokens. Leave out the session id",
    "token_indices_to_pool": "its positions would refer to other tokens. Leave out the session id",
    "return_hidden_states": "a folded history has none. Leave out the session id",
    "return_routed_experts": "a folded history has none. Leave out the session id",
    "return_indexer_topk": "a folded history has none. Leave out the session id",
}


@dataclass(frozen=True, eq=False)
class Beginning:
    """The beginning of a request that stands for a history: chosen pages, or an episode.

    Attributes:
        tokens: the request's first token ids.
        name: namespace in which these ids stand for the history.
        offset: by how much the positions of later tokens exceed their indices in the request.
        parameter, message: name and value of the entry in ``custom_params`` that tells the scheduler.
    """

    tokens: np.ndarray
    name: str
    offset: int
    parameter: str
    message: str

    @classmethod
    def of_pages(cls, chosen: Selection) -> Beginning:
        """Builds the beginning for chosen pages. It takes milliseconds for a long history, so call it in a thread."""
        return cls(chosen.tokens, chosen.name, chosen.offset, SELECTION, chosen.encode())


def check_client(obj: GenerateRequest) -> None:
    """Refuses parameters of a client that only the router may set.

    Raises:
        KVQuantError: the request chooses pages, or uses a namespace of chosen pages.
    """
    params = obj.sampling_params
    for each in params if isinstance(params, list) else [params]:
        custom = each.get("custom_params") if isinstance(each, dict) else None
        for name in OURS & set(custom if isinstance(custom, dict) else ()):
            raise KVQuantError(f"custom_params {name}: no client may choose what is read. Leave it out.")
    keys = obj.extra_key
    for key in keys if isinstance(keys, list) else [keys]:
        if isinstance(key, str) and key.startswith(NAME_PREFIX):
            raise KVQuantError(f"extra_key {key}: names that begin with {NAME_PREFIX} are the server's. Take another.")


def session_id_of(obj: GenerateRequest, request: HTTPRequest | None, header: str) -> str | None:
    """Returns ``session_id`` of the body, otherwise the header's value; None if neither is given.

    Args:
        header: the header's name, from ``--episodic-session-header``.

    Raises:
        KVQuantError: body and header give different ids, or the id is no text, empty or too long.
    """
    named = None if request is None else request.headers.get(header)
    named = None if named is None else _utf8(named)
    given: str | None = obj.session_id
    if given is not None and named is not None and given != named:
        raise KVQuantError(f"session_id {given!r} and {header} {named!r} differ. Send one of them.")
    found = named if given is None else given
    if found is not None and not isinstance(found, str):
        raise KVQuantError(f"session id {found!r}: must be a string.")
    if found is not None and any("\ud800" <= letter <= "\udfff" for letter in found):
        raise KVQuantError(f"session id {found!r}: half of a surrogate pair is no character. Send Unicode text.")
    if found is not None and not 0 < len(found) <= LONGEST_ID:
        raise KVQuantError(f"a session id of {len(found)} characters: must have 1 to {LONGEST_ID}.")
    return found


def _utf8(header: str) -> str:
    """Returns a header's value, which HTTP servers decode as Latin-1, in UTF-8 like bodies and URLs, if it is UTF-8."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


def tenant_of(request: HTTPRequest | None, header: str | None = None) -> str:
    """Returns the owner of a request: a hash of its API key, "" without a key. Tenants never share sessions.

    Args:
        header: the name from ``--episodic-tenant-header``; the hash then includes that header's value.

    Raises:
        KVQuantError: that header is missing or empty. Native gRPC and ``Engine`` never have it.
    """
    headers = {} if request is None else request.headers
    key = headers.get("Authorization") or ""
    scheme, _, token = key.partition(" ")
    if scheme.lower() == "bearer":  # SGLang accepts every spelling
        key = f"Bearer {token}"
    if header is None:
        return _hash(key) if key else ""
    if not (name := headers.get(header)):
        raise KVQuantError(
            f"--episodic-tenant-header {header}: this request has no such header. Let the gateway set it in every "
            "request of a session and of /v1/sessions."
        )
    return _hash(json.dumps([key, name]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_session(obj: GenerateRequest) -> None:
    """Refuses a request that cannot be part of a session.

    Raises:
        KVQuantError: names the refused field.
    """
    ids, params = obj.input_ids, obj.sampling_params
    several = isinstance(obj.text, list) or (bool(ids) and not isinstance(ids[0], int)) or isinstance(params, list)
    if several or isinstance(obj.rid, list):
        raise KVQuantError("a request of a session has several prompts. Send one request for each.")
    params = params or {}
    if not isinstance(custom := params.get("custom_params") or {}, dict):
        raise KVQuantError(f"custom_params {custom!r}: must be an object.")
    for name in ("n", "beam_width"):
        if (count := params.get(name) or 1) != 1:
            raise KVQuantError(
                f"{name} {count}: a session continues with exactly one answer. Send n requests, or no session id."
            )
    for field, why in _REFUSED.items():
        if (value := getattr(obj, field, None)) is not None and value is not False and value != []:
            raise KVQuantError(f"{field} in a request of a session: {why}.")


async def token_ids(given: Sequence[int]) -> np.ndarray:
    """Converts a prompt's tokens to int32 ``[T]``, in parts, so that other requests can run in between.

    Raises:
        KVQuantError: a value is negative or does not fit in int32, so it is no token.
    """
    ids = np.empty(len(given), np.int32)
    for at in range(0, len(given), TOKENS_AT_ONCE):
        part = given[at : at + TOKENS_AT_ONCE]
        try:
            ids[at : at + len(part)] = np.fromiter(part, np.int32, len(part))
            wrong = ids[at : at + len(part)].min() < 0
        except OverflowError:
            wrong = True
        if wrong:
            worst = min(part) if min(part) < 0 else max(part)
            raise KVQuantError(f"input_ids {worst}: not a token. Send ids of the model's vocabulary.")
        await asyncio.sleep(0)
    return ids


def namespace_of(obj: GenerateRequest) -> Namespace:
    """Returns the names under which SGLang caches the tokens of a normalized request."""
    return obj.extra_key or None, getattr(obj, "cache_salt", None) or None


def compute_request(obj: GenerateRequest, ids: array[int], namespace: Namespace, rid: str | None) -> GenerateRequest:
    """Builds a request that computes ``ids`` and leaves them in the cache, under ``namespace``.

    The one token that it samples is dropped.

    Args:
        ids: result of ``token_array``.
    """
    salt = {} if namespace[1] is None else {"cache_salt": namespace[1]}
    return type(obj)(
        rid=rid,
        input_ids=ids,
        sampling_params={"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        extra_key=namespace[0],
        priority=obj.priority,
        background=obj.background,  # if False, SGLang aborts the request when its client leaves
        log_metrics=False,
        no_logs=True,
        **salt,
    )


async def token_array(ids: np.ndarray) -> array[int]:
    """Converts tokens to the array type that SGLang uses, in parts, so that other requests can run in between.

    In one piece it would take 20 ms for a million tokens, mostly to allocate memory.
    """
    tokens: array[int] = array("q")
    for at in range(0, len(ids), TOKENS_AT_ONCE):
        tokens.frombytes(ids[at : at + TOKENS_AT_ONCE].astype(np.int64).data.cast("B"))
        await asyncio.sleep(0)
    return tokens


def answer_request(
    obj: GenerateRequest,
    ids: np.ndarray,
    plan: Plan,
    start: Beginning,
    preferred: dict[str, Any],
    room: int,
) -> GenerateRequest:
    """Builds the request that answers a prompt from chosen pages of its history, or an episode, and its tail.

    Args:
        obj: the client's request, normalized.
        preferred: this server's default sampling parameters.
        room: maximum number of answer tokens for which the model's context has positions. SGLang cannot check this,
            because the request has fewer tokens than the prompt.

    Raises:
        KVQuantError: the client wants log-probabilities from within the history, most of which is not read.
    """
    inner = copy.copy(obj)
    inner.text, inner.session_id = None, None
    inner.input_ids = np.concatenate([start.tokens, ids[plan.history :]]).tolist()
    inner.extra_key = start.name
    inner.return_prompt_token_ids = False
    inner.logprob_start_len = _logprob_start(obj, plan, start.offset)
    params = dict(obj.sampling_params)
    # None means as much as there is room for; 128 is SGLang's default for a request that does not say.
    given = {"max_new_tokens": 128, **preferred, **params}["max_new_tokens"]
    params["max_new_tokens"] = room if given is None else min(given, room)
    if "min_new_tokens" in params:
        params["min_new_tokens"] = min(params["min_new_tokens"], params["max_new_tokens"])
    params["custom_params"] = {**(params.get("custom_params") or {}), start.parameter: start.message}
    inner.sampling_params = params
    return inner


def _logprob_start(obj: GenerateRequest, plan: Plan, offset: int) -> int:
    start: int = obj.logprob_start_len
    if not obj.return_logprob or start == -1:
        return -1
    if not plan.history <= start < plan.tokens:
        raise KVQuantError(
            f"logprob_start_len {start}: the first {plan.history} of {plan.tokens} tokens are history, of which this "
            f"session reads only parts. Use -1, or a value from {plan.history} to {plan.tokens - 1}."
        )
    return start - offset


def computed_of(meta: dict[str, Any]) -> int:
    """Returns how many prompt tokens an ended request computed, by its ``meta_info``; 0 if it never ran."""
    return int(meta.get("prompt_tokens", 0)) - int(meta.get("cached_tokens") or 0)


def answer_output(out: Output, obj: GenerateRequest, ids: np.ndarray, computed: int) -> Output:
    """Turns an inner request's answer into the client's: usage then counts the prompt that the client sent.

    Args:
        computed: tokens that earlier inner requests computed for this answer.
    """
    meta = out["meta_info"]
    if "prompt_tokens" not in meta:  # aborted before it ran
        meta |= {"prompt_tokens": len(ids), "cached_tokens": 0}
        return out
    computed += computed_of(meta)
    meta["prompt_tokens"] = len(ids)
    more = max(0, len(ids) - computed) - meta.get("cached_tokens", 0)
    meta["cached_tokens"] = meta.get("cached_tokens", 0) + more
    details = meta.get("cached_tokens_details")
    if isinstance(details, dict) and "device" in details:
        meta["cached_tokens_details"] = {**details, "device": details["device"] + more}
    if obj.return_prompt_token_ids:
        out["prompt_token_ids"] = ids.tolist()
    return out
