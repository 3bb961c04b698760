"""The manifests in docker/kubernetes, as ``kubectl kustomize`` renders them."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "docker" / "kubernetes"
OVERLAYS = ("cpu-trial", "gpu-node", "fleet")
WORKLOADS = ("Deployment", "StatefulSet")

Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not here: it renders the manifests"
)


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Every object of an overlay; none may be changed."""
    folder = KUBERNETES / "overlays" / overlay
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # what kustomize is going to drop
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The one object of a kind and name."""
    (found,) = [one for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    return found


def pod_of(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Manifest) -> Manifest:
    """The only container of a workload's pods."""
    (container,) = pod_of(workload)["containers"]
    found: Manifest = container
    return found


def environment_of(container: Manifest) -> dict[str, str | None]:
    """Values by variable; None for one that comes from a secret."""
    return {one["name"]: one.get("value") for one in container["env"]}


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def named_ports(container: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def find(value: Any, key: str) -> Iterator[Any]:
    """Every value at ``key``, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from find(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, key)
