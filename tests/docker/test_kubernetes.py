"""The manifests for Kubernetes are valid, and fit each other and the code. No cluster ran them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.settings import Settings
from tests.support.manifests import (
    KUBERNETES,
    OVERLAYS,
    WORKLOADS,
    Manifest,
    container_of,
    environment_of,
    find,
    named,
    named_ports,
    needs_kubectl,
    of_kind,
    pod_of,
    rendered,
    selects,
)
from tools.prometheus_rule import manifest as rules_manifest
from worker.environment import names_of, variable_of
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
METRICS = (ROOT / "docs" / "metrics.md").read_text()
OPERATORS_KINDS = ("PrometheusRule", "ScaledObject", "ServiceMonitor")
"""Kinds whose schemas Kubernetes itself does not have."""
TRIGGERS = {"cpu": {"value"}, "prometheus": {"serverAddress", "query", "threshold"}}
"""Fields of KEDA's triggers, by type."""
SECRET_KEYS = {"token", "admin-token", "lane-token", "plain-token", "valkey-password"}
LAUNCHER = {"TIDEGATE_LANES__TOKEN"}
"""Variables that the launcher of a worker reads, in addition to the worker's own."""

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def is_orchestrator(workload: Manifest) -> bool:
    return bool(workload["metadata"]["name"] == "tidegate-orchestrator")


@pytest.mark.slow
@needs_kubectl
@each_overlay
def test_kubernetes_knows_every_object(overlay: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: it has the schemas"
    ).validate
    checked = [one for one in rendered(overlay) if one["kind"] not in OPERATORS_KINDS]
    assert len(checked) >= 8
    for one in checked:
        validate(one, "1.29", strict=True)
        validate(one, "1.37", strict=True)


@needs_kubectl
@each_overlay
def test_selectors_find_what_they_are_for(overlay: str) -> None:
    objects = rendered(overlay)
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(objects, *WORKLOADS)
    }
    for one in of_kind(objects, *WORKLOADS):
        own = pods[one["metadata"]["name"]]
        assert selects(one["spec"]["selector"]["matchLabels"], own)
        for spread in pod_of(one).get("topologySpreadConstraints", []):
            assert selects(spread["labelSelector"]["matchLabels"], own)
    policies = of_kind(objects, "NetworkPolicy")
    found = [
        *(one["spec"]["selector"] for one in of_kind(objects, "Service")),
        *(
            one["spec"]["selector"]["matchLabels"]
            for one in of_kind(objects, "PodDisruptionBudget")
        ),
        *(selector["matchLabels"] for selector in find(policies, "podSelector")),
    ]
    for selector in found:
        if "k8s-app" in selector:
            assert selector == {"k8s-app": "kube-dns"}, "no pod of the cluster's DNS has more"
            continue
        assert sum(selects(selector, labels) for labels in pods.values()) == 1, selector
    for one in of_kind(objects, "StatefulSet"):
        assert named(objects, "Service", one["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


@needs_kubectl
@each_overlay
def test_ports_are_those_of_the_containers(overlay: str) -> None:
    objects = rendered(overlay)
    containers = {
        one["metadata"]["name"]: container_of(one) for one in of_kind(objects, *WORKLOADS)
    }
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(objects, *WORKLOADS)
    }

    def ports_behind(selector: dict[str, str]) -> dict[str, int]:
        (name,) = [name for name, own in labels.items() if selects(selector, own)]
        return named_ports(containers[name])

    for container in containers.values():
        for probe in find(container, "httpGet"):
            assert probe["port"] in named_ports(container)
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_behind(service["spec"]["selector"])
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            own = ports_behind(policy["spec"]["podSelector"]["matchLabels"])
            assert all(port["port"] in own for port in rule["ports"])
        for rule in policy["spec"].get("egress", []):
            (peer,) = rule["to"]
            selector = peer["podSelector"]["matchLabels"]
            if "k8s-app" in selector:
                continue
            behind = ports_behind(selector)
            assert all(
                port["port"] in behind or port["port"] in behind.values() for port in rule["ports"]
            )
    environment = environment_of(containers["tidegate-orchestrator"])
    found = re.fullmatch(r"dns:([\w-]+):(\d+)", environment["TIDEGATE_INSTANCES"] or "")
    assert found
    worker = named(objects, "Service", found[1])
    assert [port["port"] for port in worker["spec"]["ports"]] == [int(found[2])]
    assert int(found[2]) == named_ports(containers["tidegate-worker"])["triton-grpc"]
    assert environment["TIDEGATE_HEALTH__PORT"] == str(
        named_ports(containers["tidegate-orchestrator"])["health"]
    )


@needs_kubectl
@each_overlay
def test_variables_are_settings(overlay: str) -> None:
    of_orchestrators = {variable_of("TIDEGATE_", name) for name in names_of(Settings)}
    of_workers = {variable_of("TIDEGATE_WORKER__", name) for name in names_of(WorkerSettings)}
    objects = rendered(overlay)
    for one in of_kind(objects, *WORKLOADS):
        known = of_orchestrators if is_orchestrator(one) else of_workers | LAUNCHER
        variables = {
            name for name in environment_of(container_of(one)) if name.startswith("TIDEGATE_")
        }
        if "TIDEGATE_STATE" not in of_orchestrators:
            variables = {name for name in variables if not name.startswith("TIDEGATE_STATE__")}
        assert variables <= known, one["metadata"]["name"]
        for reference in find(container_of(one), "secretKeyRef"):
            assert reference["name"] == "tidegate"
            assert reference["key"] in SECRET_KEYS
    readme = (ROOT / "docker" / "README.md").read_text()
    assert all(f"--from-literal={key}=" in readme for key in SECRET_KEYS)


@needs_kubectl
@each_overlay
def test_pf5_probes(overlay: str) -> None:
    """A worker's start may take longer, and its launcher restarts Triton by itself."""

    def timing(probe: Manifest) -> tuple[int, ...]:
        names = ("periodSeconds", "timeoutSeconds", "failureThreshold")
        return (probe.get("initialDelaySeconds", 0), *(probe[name] for name in names))

    objects = rendered(overlay)
    orchestrator = container_of(named(objects, "Deployment", "tidegate-orchestrator"))
    assert timing(orchestrator["livenessProbe"]) == (10, 10, 1, 3)
    assert timing(orchestrator["readinessProbe"]) == (10, 5, 1, 2)
    assert timing(orchestrator["startupProbe"]) == (0, 2, 1, 30)
    worker = container_of(named(objects, "StatefulSet", "tidegate-worker"))
    assert timing(worker["readinessProbe"]) == (10, 5, 1, 2)
    load_timeout = int(worker["args"][worker["args"].index("--load-timeout") + 1])
    for probe in (worker["startupProbe"], worker["livenessProbe"]):
        assert probe["periodSeconds"] * probe["failureThreshold"] >= load_timeout


@needs_kubectl
@each_overlay
def test_the_grace_holds_the_drain(overlay: str) -> None:
    """A kubelet sends SIGKILL when the grace is over, whatever preStop and SIGTERM have begun."""
    objects = rendered(overlay)
    orchestrator = named(objects, "Deployment", "tidegate-orchestrator")
    container = container_of(orchestrator)
    _, _, script = container["lifecycle"]["preStop"]["exec"]["command"]
    found = re.fullmatch(
        r"sleep (\d+); TIDEGATE_TOKEN=\S+ exec tidegate drain --grace (\d+)", script
    )
    assert found
    after = int(environment_of(container)["TIDEGATE_SHUTDOWN__GRACE_S"] or 0)
    grace = pod_of(orchestrator)["terminationGracePeriodSeconds"]
    assert int(found[1]) + int(found[2]) + after < grace
    worker = named(objects, "StatefulSet", "tidegate-worker")
    arguments = container_of(worker)["args"]
    drain = int(arguments[arguments.index("--drain") + 1])
    assert drain + 10 <= pod_of(worker)["terminationGracePeriodSeconds"]
    # What is moved to other workers has to fit into the drain of an orchestrator, too.
    assert drain <= int(found[2])


@needs_kubectl
def test_scalers_and_monitors_name_what_is_there() -> None:
    objects = rendered("fleet")
    scalers = of_kind(objects, "ScaledObject")
    assert len(scalers) == 2
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        workload = named(objects, target["kind"], target["name"])
        assert "replicas" not in workload["spec"], "each apply would undo what KEDA chose"
        assert scaler["spec"]["minReplicaCount"] <= scaler["spec"]["maxReplicaCount"]
        for trigger in scaler["spec"]["triggers"]:
            wanted = TRIGGERS[trigger["type"]]
            assert set(trigger["metadata"]) == wanted, "what KEDA's scaler of that type reads"
            assert trigger["metricType"] in ("AverageValue", "Utilization", "Value")
    monitor = named(objects, "ServiceMonitor", "tidegate")["spec"]
    service = named(objects, "Service", "tidegate")
    assert selects(monitor["selector"]["matchLabels"], service["metadata"]["labels"])
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports
    rules = (KUBERNETES / "components" / "monitoring" / "rules.yaml").read_text()
    (job,) = set(re.findall(r'job="(\w+)"', rules))
    assert service["metadata"]["labels"][monitor["jobLabel"]] == job


def test_pf7_a_scaler_without_keda_asks_for_the_same() -> None:
    """Kubernetes' own, whose schema is known; its behavior is that of KEDA's."""
    components = KUBERNETES / "components"
    scaler = yaml.safe_load((components / "autoscaling-hpa" / "scaler.yaml").read_text())
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: it has the schemas"
    ).validate
    validate(scaler, "1.29", strict=True)
    validate(scaler, "1.37", strict=True)
    scalers = (components / "autoscaling" / "scalers.yaml").read_text()
    keda, _ = yaml.safe_load_all(scalers)
    spec, own = keda["spec"], scaler["spec"]
    assert own["scaleTargetRef"] == spec["scaleTargetRef"]
    assert (own["minReplicas"], own["maxReplicas"]) == (
        spec["minReplicaCount"],
        spec["maxReplicaCount"],
    )
    assert own["behavior"] == spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (metric,), (trigger,) = own["metrics"], spec["triggers"]
    assert metric["external"]["metric"]["name"] in trigger["metadata"]["query"]
    assert metric["external"]["target"]["averageValue"] == trigger["metadata"]["threshold"]


@needs_kubectl
def test_scalers_ask_for_metrics_that_there_are() -> None:
    objects = rendered("fleet")
    recorded = {one for one in find(of_kind(objects, "PrometheusRule"), "record")}
    known = set(re.findall(r"^- `([\w:]+)", METRICS, re.M)) | recorded
    queries: list[Any] = list(find(of_kind(objects, "ScaledObject"), "query"))
    assert any("tidegate_instances_needed" in query for query in queries)
    for query in queries:
        names = re.findall(r"\btidegate[_:][\w:]+", query)
        assert names
        for name in names:
            assert name in known or re.sub(r"_(bucket|sum|count)$", "", name) in known


def test_the_rules_are_those_of_the_alerts() -> None:
    rules = KUBERNETES / "components" / "monitoring" / "rules.yaml"
    assert rules.read_text() == rules_manifest(), (
        f"run python -m tools.prometheus_rule > {rules.relative_to(ROOT)}"
    )


@needs_kubectl
@each_overlay
def test_commands_are_tidegates(overlay: str) -> None:
    """Every option of a container's command, and of its preStop hook, is one that there is."""
    from click.testing import CliRunner

    from tidegate.cli.commands import tidegate

    objects = rendered(overlay)
    names = (("Deployment", "tidegate-orchestrator"), ("StatefulSet", "tidegate-worker"))
    lines = [container_of(named(objects, *name))["args"] for name in names]
    orchestrator = container_of(named(objects, "Deployment", "tidegate-orchestrator"))
    script = orchestrator["lifecycle"]["preStop"]["exec"]["command"][2]
    lines.append(shlex.split(script.partition(" tidegate ")[2]))
    for command, *arguments in lines:
        told = CliRunner().invoke(tidegate, [command, "--help"]).output
        for option in arguments:
            assert not option.startswith("--") or re.search(rf"{option}\b", told), option
