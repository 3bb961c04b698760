"""``tidegate slot``: a recipe out of arguments, the progress of the slot, its files."""

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec

from tidegate.cli.interrupt import INTERRUPTED
from tidegate.cli.options import ClipOptions
from tidegate.cli.saving import save
from tidegate.cli.slot_progress import STAGES, open_progress
from tidegate.cli.terminal import console, duration, print_json
from tidegate.client import Client
from tidegate.errors import ApiError, ProtocolError, TidegateError, Unavailable
from tidegate.slots import (
    FILES,
    SCHEMA,
    Output,
    SlotFacts,
    SlotOptions,
    SlotPreview,
    SlotQueued,
    SlotResult,
    SlotStage,
)

_MAKE_SURE_S = 2.0
_NOBODY = (
    "no instance of this service renders clips now; start one that does with "
    "`tidegate up --slot`, or try again shortly"
)


class Unusable(ValueError):
    """An argument that cannot be used, whatever the service would say."""


def recipe_of(options: ClipOptions) -> dict[str, Any]:
    """Recipe from the file, changed by what else was given. Raises ``Unusable``."""
    recipe: dict[str, Any] = {"schema": SCHEMA}
    if options.recipe is not None:
        try:
            recipe = msgspec.json.decode(options.recipe.read_bytes())
        except OSError as error:
            raise Unusable(f"--recipe {options.recipe}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unusable(f"--recipe {options.recipe} is not JSON: {error}") from None
        if not isinstance(recipe, dict):
            raise Unusable(f"--recipe {options.recipe} holds no JSON object: see docs/slot.md")
    if options.text is not None:
        recipe["text"] = sys.stdin.read().strip() if options.text == "-" else options.text
    changes: Mapping[str, Mapping[str, object]] = {
        "portrait": {"prompt": options.portrait, "seed": options.seed},
        "voice": {"name": options.voice},
        "video": {"size": options.size, "seconds": options.seconds},
    }
    for part, fields in changes.items():
        given = {name: value for name, value in fields.items() if value is not None}
        known = recipe.get(part, {})
        if given and isinstance(known, dict):  # else the service says what is wrong with it
            recipe[part] = known | given
    return recipe


def check_files(options: ClipOptions) -> None:
    """Make sure that a clip can be saved before it is rendered. Raises ``Unusable``."""
    if len({_output(path) for path in options.out}) < len(options.out):
        raise Unusable("--out: one file of each kind at most")
    for path in (*options.out, *filter(None, [options.preview])):
        folder = path.parent
        if not folder.is_dir():
            raise Unusable(f"{path}: there is no directory {folder}")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise Unusable(f"{path} cannot be written")


async def run(client: Client, options: ClipOptions, recipe: dict[str, Any]) -> int:
    """Render a clip; the exit status. Raises ``TidegateError`` once what there is was saved."""
    slot_id = ""
    stream = client.slots.stream(recipe, **_options(options))
    try:
        async with stream as events:
            with open_progress() as progress:
                async for event in events:
                    if isinstance(event, SlotQueued):
                        slot_id = event.slot_id
                        progress.queued(event)
                    elif isinstance(event, SlotStage):
                        progress.stage(event)
                    elif isinstance(event, SlotPreview) and options.preview is not None:
                        save(options.preview, event.data)
                    elif isinstance(event, SlotResult):
                        slot_id = event.slot_id or slot_id
                        progress.done()
                        break
                else:
                    raise ProtocolError("the stream ended without a terminal event")
        saved = await _download(client, options, slot_id, event.outputs)
    except asyncio.CancelledError:
        await _say_cancelled(client, slot_id)
        return INTERRUPTED
    except ApiError as error:
        if error.code == "not_ready":
            raise Unavailable(_NOBODY, code=error.code, status=error.status) from None
        # What there was by then, with the reason behind it.
        outputs = error.details.get("outputs") or {}
        with suppress(TidegateError):  # the reason counts
            for name, path in (await _download(client, options, slot_id, outputs)).items():
                print(f"tidegate slot: saved {path} ({name}) of what there was", file=sys.stderr)
        raise
    if options.as_json:
        print_json(msgspec.to_builtins(event) | {"files": {k: str(v) for k, v in saved.items()}})
    else:
        _tell(event, saved)
    return 0


def _options(options: ClipOptions) -> SlotOptions:
    sent = SlotOptions(outputs=[_output(path) for path in options.out], on_disconnect="cancel")
    if options.preview is not None:
        sent["preview"] = True
    if options.deadline is not None:
        sent["deadline"] = timedelta(seconds=options.deadline)
    if options.on_deadline is not None:
        sent["on_deadline"] = options.on_deadline
    return sent


def _output(path: Path) -> Output:
    """Name of the slot's output that belongs in ``path``, by its suffix. Raises ``Unusable``."""
    name = path.suffix.lower().removeprefix(".")
    if name not in FILES:
        raise Unusable(f"--out {path}: its name must end in .mp4, .wav or .png")
    return cast(Output, name)


async def _download(
    client: Client, options: ClipOptions, slot_id: str, outputs: Mapping[str, str]
) -> dict[str, Path]:
    """Save those of the wished outputs that there are; returns the path of each."""
    saved: dict[str, Path] = {}
    for path in options.out:
        name = _output(path)
        if name in outputs:
            save(path, await client.slots.download(slot_id, name))
            saved[name] = path
    return saved


async def _say_cancelled(client: Client, slot_id: str) -> None:
    """Tell what became of the slot: leaving its stream cancels it if the service can be reached."""
    said = "cancelled"
    if slot_id:
        said = f"interrupted; slot {slot_id} may still be rendered, the service did not answer"
        with suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(_MAKE_SURE_S):
                standing = await client.slots.get(slot_id)
                if standing.outcome in ("met", "partial"):
                    said = f"interrupted; slot {slot_id} was rendered all the same"
                elif standing.ended:
                    said = f"cancelled slot {slot_id}"
    print(f"tidegate slot: {said}", file=sys.stderr)


def _tell(result: SlotFacts, saved: Mapping[str, Path]) -> None:
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
        out.print(f"given up to be in time: {', '.join(result.given_up)}", style="yellow")
    if result.check is not None and not result.check.passed:
        score = "" if result.check.score is None else f" (score {result.check.score:.2f})"
        out.print(f"the picture does not fit its prompt well{score}", style="yellow")
