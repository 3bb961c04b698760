"""``tidegate slot``: builds a recipe from arguments, shows the progress, saves the files."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import click

from tidegate.cli.arguments import POSITIVE, SECONDS, Command, Number, option
from tidegate.cli.asking import asks
from tidegate.cli.runtime import INTERRUPTED, importing
from tidegate.cli.terminal import console, duration, print_json
from tidegate.errors import ApiError, ProtocolError, TidegateError, Unavailable

if TYPE_CHECKING:
    from tidegate.client import Client
    from tidegate.slots import Output, SlotFacts, SlotOptions, SlotQueued, SlotStage

DESCRIPTION = """\
Render a short talking clip by a deadline, watch its progress, and save it.

  tidegate slot "A friendly host says good morning." --out clip.mp4
  tidegate slot "Good morning." --deadline 20 --on-deadline degrade
  tidegate slot --recipe recipe.json --out clip.mp4 --out speech.wav --out portrait.png
  echo "Good morning." | tidegate slot - --json

Ctrl-C cancels it, on the server too.
"""

EPILOG = """\
exit status: 0 the clip is complete, 1 it is not (the reason is on stderr, and a partial result is
saved), 2 wrong usage, 130 Ctrl-C
"""

_FILE = click.Path(dir_okay=False, path_type=Path)
STAGES: Final = {"audio": "speech", "image": "portrait", "video": "video", "clip": "check"}
"""Names of the stages for people."""
_FIELDS: Final = {
    "portrait": ("portrait", "prompt"),
    "seed": ("portrait", "seed"),
    "voice": ("voice", "name"),
    "size": ("video", "size"),
    "seconds": ("video", "seconds"),
}
"""Part and field of the recipe that an option changes."""
_MAKE_SURE_S = 2.0
_NOBODY = (
    "no instance of this service renders clips now; start one that does with "
    "`tidegate up --slot`, or try again shortly"
)


def _said(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """Read ``-`` here, because no event loop runs yet that would delay Ctrl-C."""
    return sys.stdin.read().strip() if text == "-" and not ctx.resilient_parsing else text


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="render a clip")
@click.argument("text", required=False, callback=_said)
@option(
    "--out",
    type=_FILE,
    multiple=True,
    default=(Path("clip.mp4"),),
    help="output file; .mp4, .wav or .png selects which one; may be repeated",
)
@option(
    "--recipe", type=_FILE, help="a whole recipe, JSON (docs/slot.md); the other options change it"
)
@option("--portrait", metavar="PROMPT", help="who says it")
@option("--seed", type=Number("seed", 0, 2**63 - 1), help="which face")
@option("--voice", metavar="NAME", help="one of the speech provider's")
@option("--size", type=POSITIVE, metavar="PIXELS", help="side length (the service's default)")
@option("--seconds", type=SECONDS, metavar="S", help="maximum length of the clip")
@option("--deadline", type=SECONDS, metavar="S", help="time to render (the service's default)")
@option(
    "--on-deadline",
    type=click.Choice(["error", "degrade"]),
    help="degrade: render less rather than be late (error)",
)
@asks()
async def slot(
    client: "Client",
    text: str | None,
    out: tuple[Path, ...],
    recipe: Path | None,
    deadline: float | None,
    on_deadline: Literal["error", "degrade"] | None,
    as_json: bool,
    **changes: object,
) -> int:
    if text is None and recipe is None:
        raise click.UsageError("give a text, or a --recipe")
    body = _recipe(recipe, text, changes)
    files = _files(out)
    options: SlotOptions = {"outputs": list(files), "on_disconnect": "cancel"}
    if deadline is not None:
        options["deadline"] = 1000 * deadline
    if on_deadline is not None:
        options["on_deadline"] = on_deadline
    return await _render(client, body, options, files, as_json=as_json)


def _recipe(file: Path | None, text: str | None, changes: Mapping[str, object]) -> dict[str, Any]:
    """Recipe from the file, with the given changes; None keeps the value of the file or the
    service. Raises ``UsageError``, like every check of arguments here."""
    import msgspec

    from tidegate.slots import SCHEMA

    recipe: dict[str, Any] = {"schema": SCHEMA}
    if file is not None:
        try:
            recipe = msgspec.json.decode(file.read_bytes())
        except OSError as error:
            raise click.UsageError(f"--recipe {file}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--recipe {file} is not JSON: {error}") from None
        if not isinstance(recipe, dict):
            raise click.UsageError(f"--recipe {file} holds no JSON object: see docs/slot.md")
    if text is not None:
        recipe["text"] = text
    for argument, (part, name) in _FIELDS.items():
        known = recipe.get(part, {})
        # If the part is no object, the service reports the error.
        if changes[argument] is not None and isinstance(known, dict):
            recipe[part] = known | {name: changes[argument]}
    return recipe


def _files(out: Sequence[Path]) -> "dict[Output, Path]":
    """The requested outputs and their files, which are checked before a clip is rendered."""
    from tidegate.slots import FILES

    files: dict[Output, Path] = {}
    for path in out:
        name = path.suffix.lower().removeprefix(".")
        if name not in FILES:
            raise click.UsageError(f"--out {path}: its name must end in .mp4, .wav or .png")
        if name in files:
            raise click.UsageError("--out: one file of each kind at most")
        if not path.parent.is_dir():
            raise click.UsageError(f"{path}: there is no directory {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.UsageError(f"{path} cannot be written")
        files[cast("Output", name)] = path
    return files


async def _render(
    client: "Client",
    recipe: dict[str, Any],
    options: "SlotOptions",
    files: "Mapping[Output, Path]",
    *,
    as_json: bool,
) -> int:
    """Render a clip; return the exit status. Saves a partial result before ``TidegateError``."""
    import asyncio

    import msgspec

    from tidegate.slots import SlotQueued, SlotResult, SlotStage

    async def download(outputs: Mapping[str, str]) -> dict[str, Path]:
        """Save the requested outputs that exist; returns their paths."""
        saved: dict[str, Path] = {name: path for name, path in files.items() if name in outputs}
        for name, path in saved.items():
            save(path, await client.slots.download(slot_id, name))
        return saved

    slot_id = ""
    try:
        async with client.slots.stream(recipe, **options) as events:
            progress = _Progress()
            with progress.shown:
                async for event in events:
                    if isinstance(event, SlotQueued):
                        slot_id = event.slot_id
                        progress.queued(event)
                    elif isinstance(event, SlotStage):
                        progress.stage(event)
                    elif isinstance(event, SlotResult):
                        slot_id = event.slot_id or slot_id
                        break
                else:
                    raise ProtocolError("the stream ended without a terminal event")
        saved = await download(event.outputs)
    except asyncio.CancelledError:
        await _say_cancelled(client, slot_id)
        return INTERRUPTED
    except ApiError as error:
        if error.code == "not_ready":
            raise Unavailable(_NOBODY, code=error.code, status=error.status) from None
        # The partial result, with its reason.
        with suppress(TidegateError):  # raise the reason, not this
            for name, path in (await download(error.details.get("outputs") or {})).items():
                print(f"tidegate slot: saved {path} ({name}), partial result", file=sys.stderr)
        raise
    if as_json:
        print_json(msgspec.to_builtins(event) | {"files": {k: str(v) for k, v in saved.items()}})
    else:
        _tell(event, saved)
    return 0


async def _say_cancelled(client: "Client", slot_id: str) -> None:
    """Report how the slot ended. Leaving its stream cancels it, if the service is reachable."""
    import asyncio

    said = "cancelled"
    if slot_id:
        said = f"interrupted; slot {slot_id} may still be rendered, the service did not answer"
        with suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(_MAKE_SURE_S):
                standing = await client.slots.get(slot_id)
                if standing.outcome in ("met", "partial"):
                    said = f"interrupted; slot {slot_id} finished anyway"
                elif standing.ended:
                    said = f"cancelled slot {slot_id}"
    print(f"tidegate slot: {said}", file=sys.stderr)


def _tell(result: "SlotFacts", saved: Mapping[str, Path]) -> None:
    """Print a few lines about the clip."""
    out = console()
    for path in saved.values():
        out.print(f"{path}   {path.stat().st_size / 1000:.0f} kB")
    parts = []
    if result.seconds is not None:
        parts.append(f"{result.seconds:.1f} s")
    if result.frames:
        parts.append(f"{result.frames} frames at {result.fps}/s, {result.size} × {result.size}")
    took = [
        f"{title} {duration(ms)}"
        for stage, title in STAGES.items()
        if (ms := getattr(result, f"{stage}_ms"))
    ]
    if result.total_ms is not None:
        took.append(f"in all {duration(result.total_ms)}")
    out.print(", ".join(parts))
    out.print(" · ".join(took))
    if result.given_up:
        out.print(f"dropped to meet the deadline: {', '.join(result.given_up)}", style="yellow")
    if result.check is not None and not result.check.passed:
        score = "" if result.check.score is None else f" (score {result.check.score:.2f})"
        out.print(f"the picture does not fit its prompt well{score}", style="yellow")


def save(path: Path, data: bytes) -> None:
    """Write ``data`` to disk, then replace ``path``, which a player may have open. Raises
    ``TidegateError``, and then leaves an earlier file unchanged."""
    with importing(serving=True):
        from catalog.atomic import write_atomically
    try:
        os.umask(mask := os.umask(0o077))
        write_atomically(path, data, 0o666 & ~mask)
    except OSError as error:
        raise TidegateError(f"cannot write {path}: {error.strerror}") from error


class _Progress:
    """Progress on stderr: a line per finished stage, and a spinner in a terminal."""

    def __init__(self) -> None:
        self._out = console(to_stderr=True)
        self._began = time.monotonic()
        self._done: set[str] = set()
        self.shown = self._out.status("waiting")

    def queued(self, event: "SlotQueued") -> None:
        expected = []
        if event.queue_position:
            expected.append(f"{event.queue_position} before it")
        if event.predicted_ms is not None:
            expected.append(f"expected in {duration(event.predicted_ms)}")
        if expected:
            self._out.print(f"queued: {', '.join(expected)}", style="dim")

    def stage(self, event: "SlotStage") -> None:
        title = STAGES.get(event.stage, event.stage)
        self.shown.update(f"{title} {event.percent} %")
        if event.percent >= 100 and event.stage not in self._done:
            self._done.add(event.stage)
            took = duration(1000 * (time.monotonic() - self._began))
            self._out.print(f"{title} done after {took}")
