"""Client of a running server: SGLang's ``/generate`` for log-probabilities, the OpenAI API for text."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_kvq.errors import KVQuantError

#: Status codes of a failed connection. The request is sent again, which is safe because no request changes state.
_AGAIN = (502, 503, 504)


class RequestRefused(KVQuantError):
    """The server answered with an error, or not at all."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """Generated text of ``tokens`` tokens; ``complete`` is False if the token limit cut it off."""

    text: str
    complete: bool
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class ServerFacts:
    """The parts of ``/server_info`` and ``/v1/models`` that results depend on.

    Attributes:
        context_length: most tokens of prompt and answer together.
        capacity: tokens that the KV cache holds.
        chunk: ``--chunked-prefill-size``; None if prompts are not chunked.
        kv_quant: the plugin's part of ``/server_info``; None for a server without ``--kv-quant``.
    """

    version: str
    model_path: str
    device: str
    context_length: int
    capacity: int
    chunk: int | None
    kv_cache_dtype: str
    kv_quant: dict[str, Any] | None

    @property
    def method(self) -> str:
        if self.kv_quant:
            return str(self.kv_quant["method"])
        return "fp8" if "fp8" in self.kv_cache_dtype else "none"

    @property
    def allocated_bits(self) -> float:
        """Bits per stored element, scales and zeros included; ``pool_bits`` also counts BF16 windows."""
        if self.kv_quant:
            return float(self.kv_quant["record_bits_per_element"])
        return 8.0 if "fp8" in self.kv_cache_dtype else 16.0

    @property
    def pool_bits(self) -> float:
        """Bits per element of this server's whole cache, BF16 pages included; depends on the cache's size."""
        return float(self.kv_quant["bits_per_element"]) if self.kv_quant else self.allocated_bits

    @property
    def room(self) -> int:
        """Maximum number of tokens of one request."""
        # A request's last token may need a whole page.
        return min(self.context_length, self.capacity - 64)


class Client:
    """Sends requests to one server; safe to use from many threads. ``retries`` counts requests sent again.

    Args:
        url: the server's address. The environment's OPENAI_API_KEY is sent if set.
        timeout: seconds for one request.
        attempts: number of times to send a request whose connection fails.
    """

    def __init__(self, url: str, *, timeout: float = 900.0, attempts: int = 3, pause: float = 2.0) -> None:
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL()
        if address.scheme not in ("http", "https"):
            raise KVQuantError(f"--server {url}: must be a URL, such as http://127.0.0.1:30000.")
        self.url = url.rstrip("/")
        self.timeout, self.attempts, self.pause = timeout, attempts, pause
        self.retries = 0
        self._lock = threading.Lock()
        key = os.environ.get("OPENAI_API_KEY")
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # A server may close an idle connection at the moment at which the next request uses it.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=address.host not in ("127.0.0.1", "localhost", "::1"),  # no proxy for this machine
        )

    def request(self, path: str, body: Any = None) -> Any:
        """Sends a GET, or a POST of ``body``, and returns the JSON answer.

        Raises:
            RequestRefused: an error status, or no connection after all attempts.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                answer = self._http.request(
                    "GET" if body is None else "POST", self.url + path, json=body, timeout=self.timeout
                )
                if answer.is_success:
                    return answer.json()
                problem, status = f"{answer.status_code} {answer.text[:500]}", answer.status_code
            except httpx.ReadTimeout:  # not sent again: the server may still be working on it
                raise RequestRefused(f"{path}: no answer within {self.timeout:.0f} s") from None
            except httpx.TransportError as error:
                problem, status = str(error) or repr(error), None
            except ValueError as error:
                raise RequestRefused(f"{path}: the answer is not JSON ({error})") from error
            if attempt == self.attempts or (status is not None and status not in _AGAIN):
                raise RequestRefused(f"{self.url}{path}: {problem}", status)
            with self._lock:
                self.retries += 1
            time.sleep(self.pause * attempt)
        raise AssertionError("unreachable")

    # -- the server ---------------------------------------------------------------------------------------

    @functools.cached_property
    def facts(self) -> ServerFacts:
        info = self.request("/server_info")
        model = self.request("/v1/models")["data"][0]
        states = info.get("internal_states") or [{}]
        chunk = info.get("chunked_prefill_size")
        return ServerFacts(
            version=str(info.get("version", "unknown")),
            model_path=str(info.get("model_path") or model["id"]),
            device=str(info.get("device", "unknown")),
            context_length=int(model.get("max_model_len") or info.get("context_length") or 0),
            capacity=int(info.get("max_total_num_tokens") or states[0].get("max_total_num_tokens") or 0),
            chunk=int(chunk) if chunk and int(chunk) > 0 else None,
            kv_cache_dtype=str(info.get("kv_cache_dtype", "auto")),
            kv_quant=states[0].get("kv_quant"),
        )

    def style(self, wanted: str) -> str:
        """Returns ``chat`` or ``completion``; ``auto`` is chat if the model has a template."""
        return wanted if wanted != "auto" else "chat" if self.has_chat_template else "completion"

    @functools.cached_property
    def has_chat_template(self) -> bool:
        """True if the server can turn messages into a prompt, found by asking once."""
        try:
            self.chat("Hello", max_tokens=1)
        except RequestRefused as error:
            if error.status and "template" in str(error):
                return False
            raise
        return True

    # -- generation, greedy -------------------------------------------------------------------------------

    def chat(self, messages: str | list[dict[str, str]], max_tokens: int) -> Answer:
        """Sends a conversation, or one message, and returns the model's answer."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        answer = self.request("/v1/chat/completions", body)
        return _answer(answer, answer["choices"][0]["message"]["content"])

    def complete(self, prompt: str, max_tokens: int, stop: Sequence[str] = ()) -> Answer:
        body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
        answer = self.request("/v1/completions", {**body, **({"stop": list(stop)} if stop else {})})
        return _answer(answer, answer["choices"][0]["text"])

    # -- tokens and log-probabilities ---------------------------------------------------------------------

    def cache(self, ids: list[int]) -> None:
        """Has the server compute a prompt, so that its cache holds the prompt for requests that begin with it."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        self.request("/generate", {"input_ids": ids, "sampling_params": sampling})

    def prompt_logprobs(self, ids: list[int], first: int, top: int) -> dict[str, Any]:
        """Returns the log-probabilities of a prompt from position ``first`` on, from ``meta_info``.

        ``input_token_logprobs`` is a list of (log-probability, token, text), ``input_top_logprobs`` a list of such
        lists. SGLang's first entry belongs to the token at ``logprob_start_len`` and is empty. The request therefore
        starts one position earlier, and the entry is dropped here.
        """
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            "top_logprobs_num": top,
        }
        meta = self.request("/generate", body)["meta_info"]
        found = {name: meta[name][1:] for name in ("input_token_logprobs", "input_top_logprobs")}
        for name, values in found.items():
            if len(values) != len(ids) - first:
                raise RequestRefused(f"/generate: {len(values)} {name} for {len(ids) - first} positions")
        return found


def _answer(body: dict[str, Any], text: str | None) -> Answer:
    usage, complete = body["usage"], body["choices"][0]["finish_reason"] != "length"
    return Answer(text or "", complete, usage["prompt_tokens"], usage["completion_tokens"])
