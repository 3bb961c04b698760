"""``tidegate top``: looks at a service again and again."""

from rich.live import Live

from tidegate import _clock
from tidegate.cli.picture import Picture
from tidegate.cli.scrape import Samples
from tidegate.cli.terminal import console, print_json
from tidegate.client import Client
from tidegate.errors import TidegateError

_MIN_S = 0.05
"""Shortest pause in seconds between two looks: the service has other work, too."""


async def run(client: Client, url: str, *, every_s: float, once: bool, as_json: bool) -> int:
    """Show a service until Ctrl-C, or once, in JSON or where there is no terminal; returns 0."""
    out = console()
    picture = await look(client, url, None)
    if once or as_json or not out.is_terminal or out.is_dumb_terminal:
        if every_s:  # or nothing could be said of rates
            await _clock.sleep(every_s)
            picture = await look(client, url, picture.samples)
        if as_json:
            print_json(picture.facts())
        else:
            out.print(picture.render())
        return 0
    live = Live(picture.render(), console=out, screen=True, auto_refresh=False)
    with live:
        while True:
            await _clock.sleep(max(every_s, _MIN_S))
            try:
                picture = await look(client, url, picture.samples, picture.trend())
            except TidegateError as error:
                picture = picture.with_error(" ".join(str(error).split()))
            live.update(picture.render(), refresh=True)


async def look(
    client: Client, url: str, before: Samples | None, trend: tuple[float, ...] = ()
) -> Picture:
    """Take one look; rates count from ``before``, and ``trend`` has the rates of earlier looks."""
    instances = await client.instances()
    samples = Samples.parse(await client.metrics(), _clock.now())
    return Picture(url, instances, samples, before, trend)
