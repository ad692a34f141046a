"""Runs every panel's query against a Prometheus that scrapes a server under load, and draws the answers.

    python -m tests.monitoring.live --picture docs/monitoring.png

It needs Debian's package ``prometheus``. The server has four layers and runs on the CPU. The program fails if a query
returns nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.monitoring import dashboard
from launch.server import Server
from sglang_kvq.server_process import OPENER, ServerProcess, free_port
from tests import shallow
from tests.conftest import ROOT
from tests.e2e import word_embeddings

FLAGS = (
    *("--kv-quant", "int4", "--kv-quant-recent", "128", "--chunked-prefill-size", "256", "--decode-log-interval", "4"),
    *("--episodic-policy", "retrieve", "--episodic-budget", "640", "--episodic-block", "192", "--enable-metrics"),
)
INTERVAL = "30s"
RULES = ROOT / "launch" / "monitoring" / "rules.yaml"


class Prometheus(ServerProcess):
    """A Prometheus that scrapes one server every second."""

    def __init__(self, folder: Path, target: int) -> None:
        port, config = free_port(), folder / "prometheus.yaml"
        jobs = [{"job_name": "sglang", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
        # JSON is YAML.
        config.write_text(
            json.dumps({"global": {"scrape_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": jobs})
        )
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        super().__init__([*command, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log", port)

    def _healthy(self) -> bool:
        try:
            with OPENER.open(f"{self.url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def series(self, query: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Returns the curves of a query, as Grafana asks for them."""
        words = {"query": query.replace(dashboard.INTERVAL, INTERVAL), "start": begin, "end": end, "step": 2}
        with OPENER.open(f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(words)}", timeout=60) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return found


def post(server: Server, ids: list[int], tokens: int, session: str | None = None) -> None:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json", **({"X-Session-Id": session} if session else {})}
    body = json.dumps({"input_ids": ids, "sampling_params": params}).encode()
    with OPENER.open(urllib.request.Request(f"{server.url}/generate", body, headers), timeout=600) as response:
        response.read()


def load(server: Server, seconds: float) -> None:
    """Sends more short requests than run at once, and turns of two long sessions."""
    deadline = time.time() + seconds
    failed: list[BaseException] = []

    def repeat(seed: int) -> None:
        numbers, history = random.Random(seed), random.Random(seed).choices(range(200, 9000), k=700)
        try:
            while time.time() < deadline:
                if seed < 2:
                    history += numbers.choices(range(200, 9000), k=40)
                    post(server, history[:1500], 8, f"session {seed}")
                else:
                    post(server, numbers.choices(range(200, 9000), k=numbers.randrange(40, 200)), 16)
        except BaseException as error:  # the main thread raises it
            failed.append(error)

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def curves(prometheus: Prometheus, begin: float, end: float) -> Iterator[tuple[dashboard.Panel, str, list[dict]]]:
    """Yields the answer to each query of each panel, and prints its range.

    Raises:
        LookupError: a query returned no number.
    """
    for panel in dashboard.PANELS:
        for query, legend in panel.queries:
            found = prometheus.series(query, begin, end)
            values = [float(value) for curve in found for _, value in curve["values"] if value != "NaN"]
            if not values:
                raise LookupError(f"{panel.title}: {query} returned nothing")
            print(f"{panel.title}: {legend}: {len(found)} curves, {min(values):g} to {max(values):g}")
            yield panel, legend, found


def observe(
    model: Path, folder: Path, seconds: float, start: float
) -> tuple[float, list[tuple[dashboard.Panel, str, list[dict]]]]:
    """Serves the model's first layers under load; returns when the load began, and what ``curves`` yields.

    Args:
        folder: an empty folder.
        seconds, start: of load, and until the server must be ready.
    """
    path, embedder = word_embeddings.install(folder)
    env = {"PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    few = shallow.cut(model, folder / "shallow")
    server = Server(few, *FLAGS, "--episodic-embedder", embedder, env=env, log_path=folder / "server.log")
    server.start_timeout = start
    with server, Prometheus(folder, server.port) as prometheus:
        print(*[line for line in server.log().splitlines() if "kv-quant" in line], sep="\n")
        begin = time.time()
        load(server, seconds)
        time.sleep(3)
        return begin, list(curves(prometheus, begin, time.time()))


def draw(answers: list[tuple[dashboard.Panel, str, list[dict]]], begin: float, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(dashboard.PANELS) // 3)
    figure, axes = pyplot.subplots(rows, 3, figsize=(15, 2.6 * rows), layout="constrained")
    of_panel = dict(zip(dashboard.PANELS, axes.flat))
    for panel, legend, found in answers:
        axis = of_panel[panel]
        axis.set_title(panel.title, fontsize=10)
        for curve in found:
            label = legend
            for name, value in curve["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            label = label.replace(", rotations {{rotations_sha256}}", "")  # Prometheus omits an empty label
            times = [float(at) - begin for at, _ in curve["values"]]
            axis.plot(times, [float(value) for _, value in curve["values"]], label=label)
        axis.legend(fontsize=7, loc="lower right")
        axis.tick_params(labelsize=7)
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
        axis.set_visible(axis.has_data())
    figure.supxlabel("seconds", fontsize=9)
    figure.savefig(picture, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    parser.add_argument("--seconds", type=float, default=120, help="seconds of load; default %(default)s")
    parser.add_argument("--start", type=float, default=300, help="seconds until the server must be ready")
    args = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is not installed: apt-get install prometheus")
    with tempfile.TemporaryDirectory() as folder:
        begin, answers = observe(args.model, Path(folder), args.seconds, args.start)
    if args.picture:
        draw(answers, begin, args.picture)
        print(f"{args.picture}: written")


if __name__ == "__main__":
    main()
