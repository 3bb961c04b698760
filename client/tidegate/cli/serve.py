"""``tidegate serve``: this process becomes the orchestrator, or supervises several."""

import click

from tidegate.cli import runtime
from tidegate.cli.arguments import CORS_HELP, PORT, Command, option, processes_option
from tidegate.cli.interrupt import importing

DESCRIPTION = """\
Start the orchestrator alone, for Tritons that run elsewhere.

  tidegate serve --instances-at 10.0.0.5:8001,10.0.0.6:8001
"""


@click.command(cls=Command, help=DESCRIPTION, short_help="start the orchestrator only")
@option("--host", help="address to listen on (TIDEGATE_HOST, 127.0.0.1)")
@option("--port", type=PORT, help="port to listen on (TIDEGATE_PORT, 8080)")
@option(
    "--instances-at",
    metavar="HOST:PORT,…",
    help="gRPC addresses of the Tritons (TIDEGATE_INSTANCES, 127.0.0.1:8001)",
)
@option("--cors-origins", metavar="ORIGIN,…", help=CORS_HELP)
@processes_option
def serve(
    host: str | None,
    port: int | None,
    instances_at: str | None,
    cors_origins: str | None,
    processes: int,
) -> int:
    """Replace this process by the orchestrator, whose exit status becomes its own, and do not
    return; or run several processes, and return the exit status."""
    if processes > 1:
        with importing():
            runtime.add_to_path()
            from tidegate.cli import several
        return several.serve(host, port, instances_at, cors_origins, processes)
    given = {
        "--host": host,
        "--port": port,
        "--instances": instances_at,
        "--cors-origins": cors_origins,
    }
    runtime.become("orchestrator", given)
