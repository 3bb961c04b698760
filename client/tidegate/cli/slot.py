"""``tidegate slot``: its arguments."""

from pathlib import Path

import click

from tidegate.cli.arguments import (
    POSITIVE,
    SECONDS,
    Choice,
    Command,
    Number,
    json_option,
    option,
    server_options,
)
from tidegate.cli.interrupt import importing
from tidegate.cli.options import ClipOptions

DESCRIPTION = """\
Have a short talking clip rendered against a deadline, watch it being made, and save it.

  tidegate slot "A friendly host says good morning." --out clip.mp4
  tidegate slot "Good morning." --deadline 20 --on-deadline degrade
  tidegate slot --recipe recipe.json --out clip.mp4 --out speech.wav --out portrait.png
  echo "Good morning." | tidegate slot - --json

Ctrl-C cancels it, on the server too.
"""

EPILOG = """\
exit status: 0 the clip is there, 1 it is not (the reason is on stderr, and what there was of it is
saved), 2 wrong usage, 130 Ctrl-C
"""

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="have a clip rendered")
@click.argument("text", required=False)
@server_options
@option(
    "--out",
    type=_FILE,
    multiple=True,
    default=(Path("clip.mp4"),),
    help="where it goes; .mp4, .wav and .png say which of its files, several may be given",
)
@option(
    "--recipe", type=_FILE, help="a whole recipe, JSON (docs/slot.md); the other options change it"
)
@option("--portrait", metavar="PROMPT", help="who says it")
@option(
    "--seed", type=Number("seed", 0, 2**63 - 1, "must be from 0 to 2^63 - 1"), help="which face"
)
@option("--voice", metavar="NAME", help="one of the speech provider's")
@option("--size", type=POSITIVE, metavar="PIXELS", help="of either side (the service's own)")
@option("--seconds", type=SECONDS, metavar="S", help="of the clip, at most")
@option("--deadline", type=SECONDS, metavar="S", help="seconds it may take (the service's own)")
@option(
    "--on-deadline",
    type=Choice(["error", "degrade"]),
    help="degrade: render less rather than be late (error)",
)
@option(
    "--preview", type=_FILE, metavar="JPEG", help="keep the latest picture of it there meanwhile"
)
@json_option
def slot(
    url: str,
    token: str | None,
    text: str | None,
    recipe: Path | None,
    as_json: bool,
    **given: object,
) -> int:
    if text is None and recipe is None:
        raise click.UsageError("give a text, or a --recipe")
    with importing():
        from tidegate.cli import asking, rendering

    clip = ClipOptions(text=text, recipe=recipe, as_json=as_json, **given)  # type: ignore[arg-type]
    try:
        body = rendering.recipe_of(clip)
        rendering.check_files(clip)
    except rendering.Unusable as error:
        raise click.UsageError(str(error)) from None
    return asking.ask(
        "slot", url, token, lambda client: rendering.run(client, clip, body), streams=True
    )
