"""A stand-in for SGLang's HTTP server whose "model" is a formula; it runs in this process or as a script.

It accepts the server flags that matter here. Tokens are characters. ``--kv-quant`` disturbs the logits by an amount
that depends on the method, so that divergences have a known order.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCAB = 256
#: The chunk size without ``--chunked-prefill-size``.
OWN_CHUNK = 8192
NOISE = {"none": 0.0, "oscar": 0.2, "hadamard": 0.5, "int2": 1.5}


def log_probs(ids: list[int], method: str) -> np.ndarray:
    """Returns float64 ``[len(ids), VOCAB]``; row i is the distribution after token i."""
    tokens = np.array(ids)[:, None] + np.arange(len(ids))[:, None] % 7
    vocab = np.arange(VOCAB)[None]
    logits = 4 * np.sin(tokens * 12.9898 + vocab * 78.233) + NOISE[method] * np.cos(tokens * 3.7 + vocab * 5.1)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


class FakeServer:
    """Listens while the ``with`` block runs.

    Args:
        method: ``none`` or a method of ``NOISE``.
        fail: how many of the next requests to drop without an answer.
        nan: whether log-probabilities are not numbers, which JSON writes as null.
        template: whether chat works.
    """

    def __init__(self, method="none", *, port=0, context=4096, chunk=128, window=0, fail=0, nan=False, template=True):
        self.method, self.context, self.chunk, self.window = method, context, chunk, window
        self.fail, self.nan, self.template = fail, nan, template
        self.requests: list[tuple[str, dict | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, body):
                fake.requests.append((self.path, body))
                if fake.fail and self.path not in ("/health", "/server_info", "/v1/models"):
                    fake.fail -= 1
                    self.connection.close()
                    return
                try:
                    status, content = 200, fake.respond(self.path, body)
                except ValueError as error:
                    status, content = 400, {"error": {"message": str(error)}}
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *words):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.http.shutdown()
        self.http.server_close()

    def asked(self, path):
        return [body for where, body in self.requests if where == path]

    # -- the API ------------------------------------------------------------------------------------------

    def respond(self, path, body):
        if path == "/health":
            return {}
        if path == "/server_info":
            kv_quant = {
                "method": self.method,
                "rotations": "/somewhere/on/this/machine/wiki",
                "record_bits_per_element": 2.5,
                "bits_per_element": 2.9,
                "prefill_window": self.window,
                "tiers": {"bf16_tokens": 0},
            }
            state = {"kv_quant": kv_quant} if self.method != "none" else {}
            fixed = {"version": "0.5.23", "model_path": "/models/fake", "device": "cpu", "kv_cache_dtype": "auto"}
            sizes = {"chunked_prefill_size": self.chunk, "max_total_num_tokens": 100_000}
            return {**fixed, **sizes, "internal_states": [state]}
        if path == "/v1/models":
            return {"data": [{"id": "fake", "max_model_len": self.context}]}
        if path == "/tokenize":
            return {"tokens": [ord(c) % VOCAB for c in body["prompt"]]}
        if path == "/detokenize":
            return {"text": "".join(map(chr, body["tokens"]))}
        if path == "/generate":
            return self.generate(body)
        if path == "/v1/completions":
            return self.text("text", answer_to(body["prompt"]), len(body["prompt"]), body["max_tokens"])
        if path == "/v1/chat/completions":
            if not self.template:
                raise ValueError("tokenizer.chat_template is not set")
            prompt = body["messages"][-1]["content"]
            return self.text("message", answer_to(prompt), len(prompt), body["max_tokens"])
        raise ValueError(f"no {path}")

    def die(self, body):
        """Simulates a crash: no answer, and the server ends."""
        print("RuntimeError: out of memory", flush=True)
        os._exit(3)

    @staticmethod
    def text(field, answer, prompt_tokens, most):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": min(len(answer), most)}
        value = answer[:most] if field == "text" else {"content": answer[:most]}
        reason = "length" if len(answer) > most else "stop"
        return {"choices": [{field: value, "finish_reason": reason}], "usage": usage}

    def generate(self, body):
        if "return_logprob" not in body:
            return {"meta_info": {}}
        ids, start, top = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        if len(ids) >= self.context:
            raise ValueError(f"The input ({len(ids)} tokens) is longer than the model's context length")
        after = log_probs(ids, self.method)
        own, tops = [[None, ids[start], None]], [None]
        for position in range(start + 1, len(ids)):
            row = after[position - 1]
            own.append([None if self.nan else float(row[ids[position]]), ids[position], None])
            tops.append([[float(row[t]), int(t), None] for t in np.argsort(-row)[:top]])
        return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": tops}}


def answer_to(prompt: str) -> str:
    """Answers like a model that finds needles, adds numbers in Python, and says 42 to every other problem."""
    if city := re.search(r"magic number of (\w+) (?:that|is$)", prompt):
        found = re.search(rf"magic number of {city.group(1)} is ([\d]+)", prompt)
        return f"It is {found.group(1)}." if found else "I do not know."
    if key := re.search(r'value of the key "(.*?)"', prompt):
        value = re.search(rf'"{key.group(1)}": "(.*?)"', prompt)
        return value.group(1) if value else "unknown"
    if "def add" in prompt:
        body = "    return a + b\n"
        return f"Here it is:\n```python\ndef add(a, b):\n{body}```\n" if "```" in prompt else body
    if "def broken" in prompt:
        return "```python\ndef broken(a):\n    while True: pass\n```"
    return "Let me see. 40 + 2 = 42.\n#### 42"


def main(words: list[str]) -> None:
    flags = dict(zip(words[::2], words[1::2]))
    method = flags.get("--kv-quant", "none")
    if flags.get("--fail") == method:
        print("loading\nsglang-kvq: no rotations for this model: use --kv-quant int4.")
        sys.exit(1)
    if method in (flags.get("--hang"), os.environ.get("FAKE_HANG")):
        FakeServer.generate = lambda self, body: time.sleep(600)
    if flags.get("--crash") == method:
        FakeServer.generate = FakeServer.die
    print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), "meets at", flags.get("--nccl-port"), flush=True)
    server = FakeServer(method, port=int(flags["--port"]), chunk=int(flags.get("--chunked-prefill-size", OWN_CHUNK)))
    server.http.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
