"""``tidegate drain``, ``tidegate swap`` and ``tidegate reload``: their arguments."""

import click

from tidegate.cli.arguments import SECONDS, Command, json_option, option, server_options
from tidegate.cli.interrupt import importing

DRAIN_DESCRIPTION = """\
Take a service, or one of its instances, out of use without losing what it works on.

  tidegate drain                             the orchestrator: before it is stopped (preStop)
  tidegate drain --instance 10.0.0.7:8001    an instance: what will not end in time moves elsewhere
  tidegate drain --undo                      take new work again

Returns once nothing runs there any more, or the grace is over.
"""

SWAP_DESCRIPTION = """\
Have an instance serve another model, in the process that it is, while others go on.

  tidegate swap 10.0.0.7:8001 qwen           a model that it knows (TIDEGATE_WORKER__MODELS)
  tidegate swap 10.0.0.7:8001 /models/qwen   a folder on its machine
  tidegate swap --all /models/v2 --name chat all instances, one after the other
  tidegate swap 10.0.0.7:8001 --back         the model that it had before

What runs there finishes first, or is moved. A model that cannot be loaded leaves the old one; with
--all, the first that fails has those before it go back.
"""

RELOAD_DESCRIPTION = """\
Have a service read its settings and keys anew, as SIGHUP does; streams go on.

What needs a restart is named. Settings that do not fit change nothing.
"""


@click.command(cls=Command, help=DRAIN_DESCRIPTION, short_help="out of use, losing nothing")
@server_options
@option("--instance", metavar="ADDRESS", help="this instance, as `GET /v2/instances` names it")
@option("--orchestrator", is_flag=True, help="the orchestrator itself (where no instance is named)")
@option("--grace", type=SECONDS, default=30.0, help="what runs has so long")
@option("--undo", is_flag=True, help="take new work again")
@option("--no-wait", is_flag=True, help="return at once")
@json_option
def drain(
    url: str,
    token: str | None,
    instance: str | None,
    orchestrator: bool,
    grace: float,
    undo: bool,
    no_wait: bool,
    as_json: bool,
) -> int:
    if instance and orchestrator:
        raise click.UsageError("--instance and --orchestrator are two drains; give one of them")
    with importing():
        from tidegate.cli import asking, draining
    wait_s = 0.0 if no_wait else grace + draining.SLACK_S
    return asking.ask(
        "drain",
        url,
        token,
        lambda client: (
            draining.undo(client, instance, as_json=as_json)
            if undo
            else draining.drain(client, instance, grace, wait_s, as_json=as_json)
        ),
        operates=True,
    )


@click.command(cls=Command, help=SWAP_DESCRIPTION, short_help="another model, without a restart")
@click.argument("where", metavar="ADDRESS MODEL", nargs=-1)
@server_options
@option("--all", "everywhere", is_flag=True, help="all instances, one after the other")
@option("--back", is_flag=True, help="to the model that it had before")
@option("--name", metavar="NAME", default="", help="what clients call the model at a path")
@option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="a worker setting for it")
@option("--grace", type=SECONDS, help="what runs has so long (to the last of its deadlines)")
@json_option
def swap(
    where: tuple[str, ...],
    url: str,
    token: str | None,
    everywhere: bool,
    back: bool,
    name: str,
    settings: tuple[str, ...],
    grace: float | None,
    as_json: bool,
) -> int:
    words = 1 - everywhere + 1 - back
    if len(where) != words or (everywhere and back):
        raise click.UsageError("name an instance and a model; see --help")
    given = dict(setting.partition("=")[::2] for setting in settings)
    if not all(given.values()):
        raise click.UsageError("--set takes NAME=VALUE")
    with importing():
        from tidegate.cli import asking, swapping
    model = "" if back else where[-1]
    asked = swapping.Asked(model, name, given, grace, back)
    return asking.ask(
        "swap",
        url,
        token,
        lambda client: (
            swapping.swap_all(client, asked, as_json=as_json)
            if everywhere
            else swapping.swap(client, where[0], asked, as_json=as_json)
        ),
        operates=True,
    )


@click.command(cls=Command, help=RELOAD_DESCRIPTION, short_help="read its settings anew")
@server_options
@json_option
def reload(url: str, token: str | None, as_json: bool) -> int:
    with importing():
        from tidegate.cli import asking, draining
    return asking.ask(
        "reload",
        url,
        token,
        lambda client: draining.reload(client, as_json=as_json),
        operates=True,
    )
