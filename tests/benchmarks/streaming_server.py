"""A stand-in for a server that SGLang's benchmark can measure: it streams words at a steady pace.

    python streaming_server.py PORT SECONDS_PER_TOKEN

It has the routes that the benchmark calls. ``/abort_request`` ends a request early, as in SGLang.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PACE = 0.0
aborted = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def reply(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            data = b'sglang:num_running_reqs{model="a"} 2.0\nsglang:num_queue_reqs{model="a"} 1.0\n'
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        elif self.path == "/v1/models":
            self.reply({"data": [{"id": "words"}]})
        else:
            state = {"effective_max_running_requests_per_dp": 8}
            self.reply({"internal_states": [state], "max_total_num_tokens": 1000, "kv_cache_dtype": "auto"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/abort_request":
            aborted.set()
            self.reply({})
            return
        if self.path == "/flush_cache":
            aborted.clear()
            self.reply({})
            return
        if self.path == "/generate" and not body.get("stream"):
            tokens = body["sampling_params"]["max_new_tokens"]
            self.reply([{"meta_info": {"completion_tokens": tokens}} for _ in body["input_ids"]])
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/generate":
            prompt, asked = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        else:
            prompt = sum(len(message["content"].split()) for message in body["messages"])
            asked = body["max_completion_tokens"]
        begin, prefilled = time.time(), 0.0
        for done in range(1, asked + 1):
            time.sleep(PACE)
            prefilled = prefilled or time.time()
            ended = done == asked or aborted.is_set()
            if self.path == "/generate":
                words = " ".join(f"w{n}" for n in range(done))
                meta = {"prompt_tokens": prompt, "completion_tokens": done, "forward_entry_time": begin}
                event = {"text": words, "meta_info": {**meta, "prefill_finished_time": prefilled}}
            else:
                usage = {"prompt_tokens": prompt, "completion_tokens": done}
                event = {"choices": [{"delta": {"content": f"w{done} "}}], "usage": usage}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            if ended:
                break
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *words: object) -> None:
        pass


if __name__ == "__main__":
    PACE = float(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
