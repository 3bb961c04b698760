"""``tidegate engines``: the inference engines on this machine."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.arguments import Group, on_catalog, option
from tidegate.cli.runtime import importing
from tidegate.cli.terminal import console, duration, print_facts, print_json, show_list

if TYPE_CHECKING:
    from catalog.engines import EngineCatalog

DESCRIPTION = """\
Engines on this machine: Triton, and other engines in their own environments.

  tidegate engines ensure vllm           install it, unless it is there
  tidegate engines ensure llamacpp --from-source
  tidegate engines list

They are in TIDEGATE_HOME/engines; docs/models.md describes the layout.
"""

ENSURE_DESCRIPTION = """\
Find, download or build an engine, and verify it with an import. Run an interrupted command again
to resume it.

  tidegate engines ensure triton --triton /opt/tritonserver
  tidegate engines ensure vllm --device cuda
"""


@click.group(cls=Group, help=DESCRIPTION, short_help="engines that run the models")
def engines() -> None:
    pass


@engines.command("ensure", help=ENSURE_DESCRIPTION, short_help="install one")
@click.argument("engine", type=click.Choice(["triton", "vllm", "llamacpp"]))
@option(
    "--device",
    "mode",
    type=click.Choice(["cuda", "cpu"]),
    help="device to run on (a GPU if there is one)",
)
@option("--from-source", is_flag=True, help="build llamacpp here, with ccache if present")
@option("--triton", type=Path, metavar="PATH", help="a Triton to use")
@option("--allow-system-packages", is_flag=True, help="install what is missing with apt-get or dnf")
@on_catalog("engines")
def ensure(
    catalog: "EngineCatalog", engine: str, triton: Path | None, as_json: bool, **given: Any
) -> int:
    if triton and engine != "triton":
        raise click.UsageError("--triton is for the engine triton")
    with importing():
        import asyncio

        from catalog.paths import state_dir
        from pool.engines.ensure import ensure_engine
    print(f"{engine}: looking for it; if it is missing, installing it (minutes)", file=sys.stderr)
    made = asyncio.run(ensure_engine(engine, state_dir(), triton=triton, **given))
    return _show(catalog, made.catalog_id, as_json)


@engines.command("list", help="Engines on this machine.", short_help="what is here")
@on_catalog("engines")
def list_engines(catalog: "EngineCatalog", as_json: bool) -> int:
    entries = catalog.entries()
    columns = ("ENGINE", "VERSION", "DEVICE", "AGE", "FROM", "ID")
    rows = (
        (
            entry.engine,
            entry.version,
            entry.compute_mode,
            duration(1000 * time.time() - entry.created_ms),
            entry.build_ref,
            entry.id,
        )
        for entry in entries
    )
    return show_list(entries, columns, rows, numbers=("AGE",), as_json=as_json)


@engines.command("show", help="Everything known about an engine.", short_help="one of them")
@click.argument("engine")
@on_catalog("engines")
def show_engine(catalog: "EngineCatalog", engine: str, as_json: bool) -> int:
    return _show(catalog, engine, as_json)


def _show(catalog: "EngineCatalog", name: str, as_json: bool) -> int:
    with importing():
        from pool.engines.environments import prepared
    entry = catalog.get(name)
    if as_json:
        print_json(entry)
        return 0
    facts: dict[str, str] = {
        "engine": f"{entry.engine} {entry.version}",
        "id": entry.id,
        "from": entry.build_ref,
        "device": entry.compute_mode,
        "flags": " ".join(entry.build_flags),
        "digest": entry.digest,
        "binary": entry.binary,
        "folders": " ".join(entry.artifacts),
        "run with": " ".join(
            f"{key}={shlex.quote(value.split(':')[0])}{':…' if ':' in value else ''}"
            for key, value in prepared(entry).environment.items()
        ),
    }
    print_facts(facts)
    return 0


@engines.command(
    "verify",
    help="Verify every file of the named engines, or of all engines.",
    short_help="check that no file has changed",
)
@click.argument("engine", nargs=-1)
@on_catalog("engines")
def verify_engines(catalog: "EngineCatalog", engine: tuple[str, ...], as_json: bool) -> int:
    with importing():
        from catalog.engines import verify_engine
    entries = [catalog.get(name) for name in engine] or catalog.entries()
    problems = {entry.id: verify_engine(entry) for entry in entries}
    if as_json:
        print_json(problems)
    else:
        for id, problem in problems.items():
            console().print(f"{id}: {problem or 'no file has changed'}")
    return 1 if any(problems.values()) else 0
