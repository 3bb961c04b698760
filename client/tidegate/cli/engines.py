"""``tidegate engines``: its commands and their arguments."""

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from tidegate.cli import runtime
from tidegate.cli.arguments import Choice, Command, Group, json_option, option
from tidegate.cli.interrupt import importing

DESCRIPTION = """\
Engines on this machine: Triton, and others' engines in environments of their own.

  tidegate engines ensure vllm           make it, unless it is there
  tidegate engines ensure llamacpp --from-source
  tidegate engines list
  tidegate engines toolchain             driver, compilers, caches

They lie in TIDEGATE_HOME/engines; docs/models.md says how.
"""

ENSURE_DESCRIPTION = """\
Have an engine on this machine: found, fetched, or built, and verified by an import. What breaks off
goes on when the command is given again.

  tidegate engines ensure triton --triton /opt/tritonserver
  tidegate engines ensure triton --image IMAGE     the docker command that runs it
  tidegate engines ensure vllm --device cuda
"""


def engines_here(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    runtime.add_to_path()
    from catalog.engines import EngineCatalog
    from catalog.errors import ProvisionError
    from catalog.paths import state_dir

    try:
        known = [(entry.id, entry.version) for entry in EngineCatalog(state_dir()).entries()]
    except ProvisionError:
        return []
    return [CompletionItem(id, help=version) for id, version in known if id.startswith(incomplete)]


@click.group(cls=Group, help=DESCRIPTION, short_help="what runs the models", no_args_is_help=False)
def engines() -> None:
    pass


@engines.command("ensure", help=ENSURE_DESCRIPTION, short_help="have one here")
@click.argument("engine", type=Choice(["triton", "vllm", "llamacpp"]))
@option("--device", type=Choice(["cuda", "cpu"]), help="what it is for (a GPU where there is one)")
@option("--from-source", is_flag=True, help="built here, with ccache where there is one: llamacpp")
@option("--triton", type=Path, metavar="PATH", help="a Triton to use")
@option("--image", default="", metavar="IMAGE", help="print how Docker runs a Triton instead")
@option("--allow-system-packages", is_flag=True, help="install what is missing with apt-get or dnf")
@json_option
def ensure(
    engine: str,
    device: str | None,
    from_source: bool,
    triton: Path | None,
    image: str,
    allow_system_packages: bool,
    as_json: bool,
) -> int:
    if (triton or image) and engine != "triton":
        raise click.UsageError("--triton and --image are for the engine triton")
    with importing():
        runtime.add_to_path()
        from tidegate.cli import engine_store
    return engine_store.ensure(
        engine,
        device,
        from_source=from_source,
        triton=triton,
        image=image,
        allow_system_packages=allow_system_packages,
        as_json=as_json,
    )


@engines.command("list", help="Engines on this machine.", short_help="what is here")
@json_option
def list_engines(as_json: bool) -> int:
    with importing():
        runtime.add_to_path()
        from tidegate.cli import engine_store
    return engine_store.listing(as_json=as_json)


@engines.command("show", help="All that is known of an engine.", short_help="one of them")
@click.argument("engine", shell_complete=engines_here)
@json_option
def show_engine(engine: str, as_json: bool) -> int:
    with importing():
        runtime.add_to_path()
        from tidegate.cli import engine_store
    return engine_store.show(engine, as_json=as_json)


@engines.command(
    "verify",
    help="Read every file of engines again (all of them, unless some are named).",
    short_help="is every file as it was",
)
@click.argument("engine", nargs=-1, shell_complete=engines_here)
@json_option
def verify_engines(engine: tuple[str, ...], as_json: bool) -> int:
    with importing():
        runtime.add_to_path()
        from tidegate.cli import engine_store
    return engine_store.verify(engine, as_json=as_json)


@engines.command(
    "toolchain",
    cls=Command,
    help="What this machine can run and build with.",
    short_help="driver, compilers, caches",
)
@option("--refresh", is_flag=True, help="look again, though it was looked at within the hour")
@json_option
def show_toolchain(refresh: bool, as_json: bool) -> int:
    with importing():
        runtime.add_to_path()
        from tidegate.cli import engine_store
    return engine_store.show_toolchain(refresh=refresh, as_json=as_json)
