"""The compose files and what they mount, by the tools that read them. No engine has run them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from clips.render.settings import RenderSettings
from orchestrator.settings import whole_settings
from tests.support.cases import for_each
from worker.environment import names_of, variable_of
from worker.settings import WorkerSettings

FOLDER = Path(__file__).parents[2] / "docker"
FLEET = FOLDER / "fleet"
PROJECTS = {
    "one": ("compose.yaml",),
    "clips": ("compose.yaml", "compose.slot.yaml"),
    "fleet": ("fleet/compose.yaml",),
    "shared": ("fleet/compose.yaml", "fleet/shared-state.yaml"),
}
GIVEN = ("ADMIN_TOKEN", "LANE_TOKEN", "MODEL", "TIDEGATE_TOKEN")
FILES = sorted({name for names in PROJECTS.values() for name in names})


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compose_command() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True, timeout=60).returncode == 0:
            return command
    return None


@pytest.mark.parametrize("project", PROJECTS)
def test_compose_reads_them(project: str) -> None:
    command = compose_command()
    if command is None:
        pytest.skip("docker compose is not here")
    files = [word for name in PROJECTS[project] for word in ("-f", str(FOLDER / name))]
    env = {**os.environ, **{name: "/given" for name in GIVEN}}
    run(*command, *files, "config", "--quiet", env=env)


def services(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / file).read_text())["services"]
    return found


@for_each("file", FILES)
def test_variables_are_settings(file: str) -> None:
    known = {variable_of("TIDEGATE_", name) for name in names_of(whole_settings())}
    known |= {variable_of("TIDEGATE_WORKER__", name) for name in names_of(WorkerSettings)}
    known |= {variable_of("TIDEGATE_SLOT__", name) for name in names_of(RenderSettings)}
    for name, service in services(file).items():
        variables = {one for one in service.get("environment", {}) if one.startswith("TIDEGATE_")}
        assert variables <= known, name


@for_each("file", FILES)
def test_what_is_mounted_is_there(file: str) -> None:
    for service in services(file).values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert ((FOLDER / file).parent / source).is_file(), source


@pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not here (Debian: apt install haproxy)"
)
def test_haproxy_takes_its_configuration() -> None:
    run("haproxy", "-c", "-f", FLEET / "haproxy.cfg")


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian: apt install prometheus)"
)
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    for file in (FLEET / "prometheus.yaml", FOLDER / "observability" / "alerts.yaml"):
        shutil.copy(file, tmp_path)
    run("promtool", "check", "config", tmp_path / "prometheus.yaml")


def test_the_job_is_the_one_that_the_rules_know() -> None:
    (scraped,) = yaml.safe_load((FLEET / "prometheus.yaml").read_text())["scrape_configs"]
    assert f'job="{scraped["job_name"]}"' in (FOLDER / "observability/alerts.yaml").read_text()


def test_containers_are_given_the_time_that_their_drain_takes() -> None:
    fleet = services("fleet/compose.yaml")
    grace = fleet["orchestrator"]["environment"]["TIDEGATE_SHUTDOWN__GRACE_S"]
    assert int(grace) < int(fleet["orchestrator"]["stop_grace_period"].removesuffix("s"))
    command = fleet["worker"]["command"]
    drain = int(command[command.index("--drain") + 1])
    assert drain + 10 <= int(fleet["worker"]["stop_grace_period"].removesuffix("s"))
