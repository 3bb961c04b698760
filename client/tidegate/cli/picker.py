"""``tidegate picker``: this process becomes an endpoint picker."""

import click

from tidegate.cli.arguments import PORT, Command, option
from tidegate.cli.runtime import become

DESCRIPTION = """\
Tell a gateway which pod gets a request, by deadline and predicted finish.

  tidegate picker --endpoints dns:vllm.default:8000 --host 0.0.0.0
  tidegate picker --endpoints 10.0.0.5:8000,10.0.0.6:8000

Serves Envoy's external processing by the endpoint picker protocol of the Kubernetes Gateway API
Inference Extension. docs/gateways.md shows both sides' configuration.
"""


@click.command(cls=Command, help=DESCRIPTION, short_help="pick pods for a gateway")
@option(
    "--endpoints",
    metavar="IP:PORT,…",
    help="the pods; also dns:host:port and file:path (TIDEGATE_PICKER__ENDPOINTS)",
)
@option("--host", help="address to listen on (TIDEGATE_PICKER__HOST, 127.0.0.1)")
@option("--port", type=PORT, help="gRPC port to listen on (TIDEGATE_PICKER__PORT, 9002)")
def picker(endpoints: str | None, host: str | None, port: int | None) -> int:
    """Replace this process by the picker, whose exit status becomes its own; no return."""
    given = {"--endpoints": endpoints, "--host": host, "--port": port}
    become("picker", given)
