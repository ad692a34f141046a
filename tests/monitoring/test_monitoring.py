"""The dashboard equals what its code builds, alerts fire when they should, and both name existing metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.monitoring import dashboard
from tests import pairs
from tests.conftest import ROOT

FOLDER = ROOT / "launch" / "monitoring"
METRIC = re.compile(r"\bsglang_kvq_\w+")
PRODUCT = [ROOT / "sglang_kvq" / "sglang" / f"{name}.py" for name in ("metrics", "router/metrics")]


def published() -> set[str]:
    """Returns the metrics in the product's source: names as Prometheus shows them, counters with ``_total``."""
    source = "".join(path.read_text() for path in PRODUCT)
    made = re.findall(r'\b(gauge|counter|per_tier)\(\s*"(\w+)",\s*"[^"]*"(, counter)?', source)
    made += re.findall(r'\b(Gauge|Counter)\(\s*"sglang_kvq_(\w+)"()', source)
    return {
        f"sglang_kvq_{name}{'_total' if kind.lower() == 'counter' or counts else ''}" for kind, name, counts in made
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
def test_committed_dashboard_is_the_built_one() -> None:
    assert dashboard.FILE.read_text() == dashboard.build(), "run python -m launch.monitoring.dashboard"


def test_every_panel_is_on_the_dashboard_with_its_queries() -> None:
    board = json.loads(dashboard.FILE.read_text())
    drawn = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in board["panels"]}
    assert drawn == {panel.title: [query for query, _ in panel.queries] for panel in dashboard.PANELS}
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("path", [dashboard.FILE, FOLDER / "rules.yaml", ROOT / "docs" / "monitoring.md"], ids=str)
def test_metrics_that_are_named_exist(path: Path) -> None:
    named = set(METRIC.findall(path.read_text()))
    assert named and named <= published(), named - published()


def test_every_metric_is_documented() -> None:
    assert published() <= set(METRIC.findall((ROOT / "docs" / "monitoring.md").read_text()))


def test_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None and not pairs.everything:
        pytest.skip("promtool is not installed")
    assert promtool, "promtool is not installed: apt-get install prometheus"
    done = subprocess.run([promtool, "test", "rules", "rules_test.yaml"], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
    rules, tests = ((FOLDER / name).read_text() for name in ("rules.yaml", "rules_test.yaml"))
    for alert in re.findall(r"alert: (\w+)", rules):
        fires = re.findall(rf"alertname: {alert}\n +exp_alerts:", tests)
        assert fires and f"alertname: {alert}}}" in tests, f"{alert}: no test that it fires, or that it is silent"
