"""``tidegate models``: its commands and their arguments."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from tidegate.cli import runtime
from tidegate.cli.arguments import (
    POSITIVE,
    SHARE,
    GroupWithDefault,
    json_option,
    option,
    server_options,
)
from tidegate.cli.completing import models_here
from tidegate.cli.interrupt import importing
from tidegate.cli.lists import ask

DESCRIPTION = """\
Models: those that a service has, and those on this machine.

  tidegate models                        what a service has
  tidegate models add Qwen/Qwen3-0.6B    fetch one from a hub (HF_ENDPOINT, HF_TOKEN)
  tidegate models add ~/models/llama     take one from this machine
  tidegate models add ./tiny.gguf        the same for llama.cpp's format
  tidegate models list                   what is on this machine

Models lie in TIDEGATE_HOME/models; docs/models.md says how.
"""

ADD_DESCRIPTION = """\
Bring a model to this machine: only the files that it needs, every one verified. What breaks off
goes on when the command is given again, and is not served before all of it is here.

  tidegate models add Qwen/Qwen3-0.6B --load
  tidegate models add org/model-GGUF --file '*Q4_K_M*'
  tidegate models add ~/models/llama --name mine
"""


@click.group(
    cls=GroupWithDefault,
    help=DESCRIPTION,
    short_help="what is served, and what is here",
    invoke_without_command=True,
    no_args_is_help=False,
)
@server_options
@json_option
@click.pass_context
def models(ctx: click.Context, url: str, token: str | None, as_json: bool) -> int:
    return 0 if ctx.invoked_subcommand is not None else _served(url, token, as_json)


@models.command("served", help="Models that a service has.", short_help="what a service has")
@server_options
@json_option
def served(url: str, token: str | None, as_json: bool) -> int:
    return _served(url, token, as_json)


@models.command("add", help=ADD_DESCRIPTION, short_help="bring one here")
@click.argument("what", metavar="HF_ID|PATH|FILE.gguf")
@option("--name", default="", metavar="NAME", help="what it is called here (its own name)")
@option("--revision", default="", metavar="REV", help="of a hub: branch, tag or commit (main)")
@option("--file", default="", metavar="GLOB", help="which GGUF file, where there are several")
@option("--load", is_flag=True, help="into memory, too, so that the next start is quick")
@option("--copy", is_flag=True, help="never by links to what lies on this machine")
@option("--allow-pickles", is_flag=True, help="weights that can run code, where no others are")
@option("--keep-free", type=SHARE, default=20, metavar="PERCENT", help="of the disk stays free")
@option("--connections", type=POSITIVE, default=8, help="files that are fetched at once")
@json_option
def add(
    what: str,
    name: str,
    revision: str,
    file: str,
    load: bool,
    copy: bool,
    allow_pickles: bool,
    keep_free: int,
    connections: int,
    as_json: bool,
) -> int:
    with _importing():
        from pool.artifacts.staging import AddRequest
        from tidegate.cli import model_adding
    request = AddRequest(
        what,
        name=name,
        revision=revision,
        file=file,
        pickles=allow_pickles,
        copy=copy,
        keep_free=keep_free / 100,
        connections=connections,
    )
    return model_adding.add(request, load=load, as_json=as_json)


@models.command("list", help="Models on this machine.", short_help="what is on this machine")
@json_option
def list_models(as_json: bool) -> int:
    with _importing():
        from tidegate.cli import model_store
    return model_store.listing(as_json=as_json)


@models.command("show", help="All that is known of a model.", short_help="one of them")
@click.argument("model", shell_complete=models_here)
@json_option
def show_model(model: str, as_json: bool) -> int:
    with _importing():
        from tidegate.cli import model_store
    return model_store.show(model, as_json=as_json)


@models.command(
    "verify",
    help="Read every byte of models again (all of them, unless some are named).",
    short_help="is every byte as it was",
)
@click.argument("model", nargs=-1, shell_complete=models_here)
@json_option
def verify(model: tuple[str, ...], as_json: bool) -> int:
    with _importing():
        from tidegate.cli import model_store
    return model_store.verify(model, as_json=as_json)


@models.command(
    "load",
    help="Read models into memory, so that their next start is quick.",
    short_help="into memory ahead of use",
)
@click.argument("model", nargs=-1, required=True, shell_complete=models_here)
@json_option
def load_models(model: tuple[str, ...], as_json: bool) -> int:
    with _importing():
        from tidegate.cli import model_store
    return model_store.load(model, as_json=as_json)


@models.command("remove", help="Delete models from this machine.", short_help="delete")
@click.argument("model", nargs=-1, required=True, shell_complete=models_here)
@option("--force", is_flag=True, help="those that are in use, too")
@json_option
def remove(model: tuple[str, ...], force: bool, as_json: bool) -> int:
    with _importing():
        from tidegate.cli import model_store
    return model_store.remove(model, force=force, as_json=as_json)


def _served(url: str, token: str | None, as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask("models", url, token, lambda client: show.models(client, as_json=as_json))


@contextmanager
def _importing() -> Iterator[None]:
    """Guard the import of modules that need ``orchestrator``, and make it importable."""
    with importing():
        runtime.add_to_path()
        yield
