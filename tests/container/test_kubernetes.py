"""Every overlay of launch/kubernetes renders to objects that the API accepts and that suit the image.

``schemas`` holds the schemas of three custom resources, as their projects published them in August 2026, without
descriptions. They also lack the pods of a LeaderWorkerSet, which are checked as pods.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "kubernetes"
OVERLAYS = ("base", "tensor-parallel", "multi-node", "replicas", "autoscale")
VERSION = "1.37"
CUSTOM = {path.stem: path for path in (Path(__file__).parent / "schemas").glob("*.json")}


@cache
def objects(overlay: str) -> list[Any]:
    """Returns the objects that an overlay renders to."""
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def closed(schema: Any) -> Any:
    """Returns the schema, changed to refuse fields that it does not name, because the API drops these silently."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(inner.get("properties"), dict) else inner


def pods(found: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields the pod templates of these objects."""
    for one in found:
        group = one["spec"].get("leaderWorkerTemplate", {}) if "spec" in one else {}
        yield from (group[key] for key in ("leaderTemplate", "workerTemplate") if key in group)
        if one["kind"] == "Deployment":
            yield one["spec"]["template"]


def check(one: dict[str, Any]) -> None:
    """Validates an object against its schema."""
    if one["kind"] in CUSTOM:
        jsonschema.validate(one, closed(json.loads(CUSTOM[one["kind"]].read_text())))
        templates = pods([one])
        for template in templates:
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, VERSION, strict=True)
    else:
        kubernetes_validate.validate(one, VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_accepts_it(overlay: str) -> None:
    found = objects(overlay)
    assert len({(one["kind"], one["metadata"]["name"]) for one in found}) == len(found) > 3
    for one in found:
        check(one)


@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_a_misspelt_field_is_seen(kind: str) -> None:
    (one,) = (one for overlay in OVERLAYS for one in objects(overlay) if one["kind"] == kind)
    with pytest.raises(jsonschema.ValidationError, match="misspelt"):
        check({**one, "spec": {**one["spec"], "misspelt": 1}})


def test_every_folder_is_checked() -> None:
    assert {path.parent.name for path in FOLDER.rglob("kustomization.yaml")} == {*OVERLAYS, "monitoring"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted_and_drain(overlay: str) -> None:
    found = list(pods(objects(overlay)))
    assert found
    for pod in found:
        spec = pod["spec"]
        (server,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]
        assert server["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert re.search(r":\d+\.\d+\.\d+$", server["image"]), "a tag that does not move"
        assert spec["terminationGracePeriodSeconds"] >= 60 and server["lifecycle"]["preStop"]
        assert server["resources"]["requests"] and server["resources"]["limits"]["memory"]
        written = {mount["mountPath"] for mount in server["volumeMounts"]}
        assert written >= ({"/home/kvq", "/tmp", "/dev/shm"} if server["name"] == "server" else {"/tmp"})
        assert {mount["name"] for mount in server["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_overlays_differ_where_they_say() -> None:
    (tensor,) = pods(objects("tensor-parallel"))
    assert "--tp=4" in tensor["spec"]["containers"][0]["args"]
    assert tensor["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert not [one for one in objects("multi-node") if one["kind"] == "Deployment"]
    for overlay in ("multi-node", "replicas", "autoscale"):
        (claim,) = (one for one in objects(overlay) if one["kind"] == "PersistentVolumeClaim")
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"], overlay


def labels(pod: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"]["labels"]
    return found


def test_alerts_see_the_pods_that_have_metrics() -> None:
    """The operator names a job after its PodMonitor, and the alerts ask for the job of ``prometheus.yaml``."""
    (monitor,) = (one for one in objects("autoscale") if one["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    monitoring = ROOT / "launch" / "monitoring"
    (job,) = yaml.safe_load((monitoring / "prometheus.yaml").read_text())["scrape_configs"]
    assert set(re.findall(r'job="(\w+)"', (monitoring / "rules.yaml").read_text())) == {job["job_name"]}
    assert {"targetLabel": "job", "replacement": job["job_name"]} in endpoint["relabelings"]

    selector = monitor["spec"]["selector"]
    (role,) = selector["matchExpressions"]
    assert role["operator"] == "NotIn"
    seen = [
        labels(pod).get("role")
        for pod in (*pods(objects("base")), *pods(objects("multi-node")))
        if selector["matchLabels"].items() <= labels(pod).items() and labels(pod).get(role["key"]) not in role["values"]
    ]
    assert seen == [None, "leader"], "the other nodes of a server have no metrics of the cache"


def test_documented_command_makes_an_object_of_the_alerts() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    (command,) = re.findall(r"^(\{ .* \}) \| kubectl apply -f -$", page, re.MULTILINE)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    rules = yaml.safe_load((ROOT / "launch" / "monitoring" / "rules.yaml").read_text())
    made = yaml.safe_load(done.stdout)
    assert made == {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "sglang-kvq"},
        "spec": rules,
    }


def test_applying_again_leaves_the_number_of_replicas_to_the_autoscaler() -> None:
    (scaled,) = (one for one in objects("autoscale") if one["kind"] == "ScaledObject")
    (target,) = (
        one
        for one in objects("autoscale")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]
    )
    assert "replicas" not in target["spec"]


def test_defaults_need_no_download_of_rotations() -> None:
    servers = [pod["spec"]["containers"][0] for overlay in OVERLAYS for pod in pods(objects(overlay))]
    assert {server["name"] for server in servers} == {"server", "router"}
    assert all("--kv-quant=int4" in server["args"] for server in servers if server["name"] == "server")
    (server,) = yaml.safe_load((ROOT / "launch" / "docker-compose.yaml").read_text())["services"].values()
    assert "--kv-quant=int4" in server["command"]


def test_compose_lets_compiled_code_be_loaded() -> None:
    """Docker mounts a tmpfs noexec by default."""
    (server,) = yaml.safe_load((ROOT / "launch" / "docker-compose.yaml").read_text())["services"].values()
    assert server["read_only"] and server["tmpfs"] == ["/tmp:exec"]
