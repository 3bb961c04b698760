"""``tidegate top`` and ``tidegate bench``: their arguments."""

import click

from tidegate.cli.arguments import (
    POSITIVE,
    RATE,
    SECONDS,
    Command,
    json_option,
    option,
    server_options,
)
from tidegate.cli.completing import model_names
from tidegate.cli.interrupt import importing

TOP_DESCRIPTION = """\
A service as it works: instances, queue, outcomes, goodput, KV. Ctrl-C leaves.

  tidegate top
  tidegate top --once            one picture, of the next second, for scripts and pipes
  tidegate top --json            the same as JSON
"""

BENCH_DESCRIPTION = """\
Load a running service and see which deadlines it keeps.

  tidegate bench                                        8 at a time, 64 in all
  tidegate bench --rate 20 --seconds 30 --deadline-ms 2000
  tidegate bench --concurrency 1 --requests 20 --json   for programs

Closed loop (--concurrency): so many clients ask again as soon as they are answered. Open loop
(--rate): requests arrive at random, whether earlier ones are answered or not, which is how real
overload looks. What a request asks for is the same each time, but for its first words, so that no
answer comes out of a cache. Times are measured here, in the client.
"""


@click.command(cls=Command, help=TOP_DESCRIPTION, short_help="watch it work")
@server_options
@option("--every", type=SECONDS, default=1.0, metavar="S", help="seconds between two looks")
@option("--once", is_flag=True, help="one picture, then leave")
@json_option
def top(url: str, token: str | None, every: float, once: bool, as_json: bool) -> int:
    with importing():
        from tidegate.cli import asking, watch
    try:
        return asking.ask(
            "top",
            url,
            token,
            lambda client: watch.run(client, url, every_s=every, once=once, as_json=as_json),
        )
    except KeyboardInterrupt:  # the way out
        return 0


@click.command(cls=Command, help=BENCH_DESCRIPTION, short_help="load it, and measure")
@server_options
@option("--model", help="a served model (the only one)", shell_complete=model_names)
@option("--concurrency", type=POSITIVE, help="closed loop: so many clients (8)")
@option("--rate", type=RATE, help="open loop: so many requests per second")
@option("--requests", type=POSITIVE, help="requests in all (64, or what --seconds allows)")
@option("--seconds", type=SECONDS, help="begin no request after so long")
@option("--prompt-words", type=POSITIVE, default=32, help="words of each prompt")
@option("--max-tokens", type=POSITIVE, default=64, help="tokens of each answer")
@option("--deadline-ms", type=POSITIVE, default=10_000, help="of each request")
@option("--first-token-ms", type=POSITIVE, help="and of its first token")
@option("--stop-early/--full-length", default=False, help="let answers end by themselves")
@option("--seed", type=POSITIVE, default=1, help="of arrivals and prompts")
@json_option
def bench(url: str, token: str | None, as_json: bool, **given: object) -> int:
    if given["concurrency"] is not None and given["rate"] is not None:
        raise click.UsageError("--concurrency is a closed loop and --rate an open one: give one")
    with importing():
        from tidegate.cli import asking, load
    plan = load.Plan.of(given)
    return asking.ask(
        "bench",
        url,
        token,
        lambda client: load.run(client, url, plan, as_json=as_json),
        streams=True,
    )
