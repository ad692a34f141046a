"""HTTP requests that the end-to-end tests send to a server."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests


def held_out_text(everything: bool = False) -> str:
    """Returns English that no calibration has seen and every machine has: the language reference within Python."""
    from pydoc_data.topics import topics

    some = ("assignment", "class", "exceptions", "import", "objects", "types")
    return "\n".join(topics[name] for name in (sorted(topics) if everything else some))


class Client:
    def __init__(self, server) -> None:
        self.url = server.url

    def post(self, path: str, **body) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=600)

    def generate(self, ids: list, tokens: int = 1, **options) -> Any:
        """Returns SGLang's answer to one prompt of token ids, or a list of answers to a list of prompts."""
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
        response = self.post("/generate", **body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, ids: list[int], tokens: int, **options) -> Iterator[dict]:
        """Yields the chunks of SGLang's answer; the request runs when the first has come, and ends with the iterator.

        Raises:
            AssertionError: the server refused the request, or sent an error.
        """
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "stream": True, **options}
        with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=600) as response:
            assert response.status_code == 200, response.text
            for line in response.iter_lines():
                assert b'"error"' not in line, line
                if line and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))

    def token_logprobs(self, ids: list[int], tokens: int = 1) -> list[float]:
        """Returns the log-probability of each prompt token after the first, then of each generated one."""
        meta = self.generate(ids, tokens, return_logprob=True, logprob_start_len=0)["meta_info"]
        pairs = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
        return [p[0] for p in pairs]

    def distributions(self, ids: list[int], top: int) -> list[dict[int, float]]:
        """Returns the ``top`` most likely tokens and their log-probabilities after each prompt token but the last."""
        options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
        meta = self.generate(ids, 1, **options)["meta_info"]
        return [{token: lp for lp, token, _ in position} for position in meta["input_top_logprobs"][1:]]

    def ask(self, question: str, tokens: int = 30) -> str:
        """Returns the greedy answer to one user message."""
        messages = [{"role": "user", "content": question}]
        response = self.post("/v1/chat/completions", model="m", messages=messages, temperature=0, max_tokens=tokens)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def states(self) -> list[dict]:
        """Returns ``kv_quant`` of each data-parallel worker."""
        response = requests.get(f"{self.url}/server_info", timeout=300)
        return [state["kv_quant"] for state in response.json()["internal_states"]]

    def state(self) -> dict:
        return self.states()[0]

    def flush(self) -> None:
        """Empties the prefix cache as soon as the server is idle."""
        deadline = time.time() + 300
        while self.post("/flush_cache").status_code != 200:
            assert time.time() < deadline, "requests are still running"
            time.sleep(0.5)


def coarse_kl(p: dict[int, float], q: dict[int, float]) -> float:
    """Returns a lower bound of the KL divergence: tokens that both list count singly, all others as one."""
    shared = [t for t in p if t in q]
    terms = [(math.exp(p[t]), math.exp(q[t])) for t in shared]
    terms.append((max(1 - sum(a for a, _ in terms), 1e-9), max(1 - sum(b for _, b in terms), 1e-9)))
    return sum(a * math.log(a / b) for a, b in terms if a > 0)


def together(jobs: list) -> list:
    """Runs zero-argument callables at once and returns their results."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]
