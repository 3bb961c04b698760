"""``tidegate up`` and ``tidegate worker``: their arguments."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tidegate.cli import runtime
from tidegate.cli.arguments import (
    CORS_HELP,
    PORT,
    POSITIVE,
    SECONDS,
    Choice,
    Command,
    Instances,
    Words,
    option,
    processes_option,
)
from tidegate.cli.interrupt import importing
from tidegate.cli.options import LaunchOptions

_F = TypeVar("_F", bound=Callable[..., object])
_ENGINES = [
    *("auto", "torch", "vllm", "llamacpp"),
    *("synthetic-free", "synthetic-paced", "synthetic-scripted"),
]

UP_DESCRIPTION = """\
Start everything on this machine and keep it up: Triton with the model, and the orchestrator in
front of it. Prints the address and a curl line once it serves.

What happens:
  1. A Triton server is found: --triton, else /opt/tritonserver (the NGC image), else the one of a
     wheel, which is fetched where it was not yet.
  2. Triton and the orchestrator start together, each in a process group of its own, with their
     output in TIDEGATE_HOME/logs/HOST-PORT/ (16 MiB each and three earlier ones, for their owner
     only).
  3. Whatever dies is started again on the same ports. A Triton that keeps dying is given up; the
     run ends when none is left, or when the orchestrator keeps dying.
  4. Ctrl-C or SIGTERM: running work gets --drain seconds, then everything ends; no process and no
     shared memory is left, not even when this command is killed. A second Ctrl-C hurries it.
"""

UP_EPILOG = f"""\
examples:
  tidegate up --device cpu --port 9000
  tidegate up --model ~/models/Qwen3-0.6B --device cuda
  tidegate up --device cpu --engine synthetic-paced     made-up tokens, for benchmarks
  tidegate up --model scripted                          known answers and tool calls, for tests
  tidegate up --device cpu --slot                       clips, too; it says what they need

environment:
  TIDEGATE_HOST, TIDEGATE_PORT    where it listens (as --host, --port)
  TIDEGATE_TOKEN                  ask this token of every client; needed to listen off loopback
  TIDEGATE_TRITON                 as --triton
  TIDEGATE_LANES__TLS             TLS at Triton's gRPC port, in JSON (docs/operating.md)
  TIDEGATE_HOME                   logs and the wheel's Triton; ~/.local/share/tidegate, .tidegate in
                                  a checkout
  TIDEGATE_WORKER__…              settings of the worker: …__KV__BLOCKS, say
  TIDEGATE_SLOT__…                settings of the slot pipeline: …__SIZE, say
  TIDEGATE_…                      settings of the orchestrator: …_QUEUE__MAX_WAITING, say
  docs/settings.md says what each setting does; where there is no checkout, so do
  worker/settings.py, clips/render/settings.py and orchestrator/settings/sections.py in
  {runtime.folder()}

exit status: 0 ended as asked, 1 it could not go on (the reason is on stderr), 2 wrong usage,
130 the end was cut short by a second Ctrl-C, or it came before anything was started
"""

WORKER_DESCRIPTION = """\
Start Triton with the model, without an orchestrator: for a machine or container of its own.
Connect one to it with `tidegate serve --instances-at HOST:8001`.
Ends as `tidegate up` does: drain, SIGTERM, SIGKILL of what is left.
"""


def _listening(function: _F) -> _F:
    function = option(
        "--port",
        type=PORT,
        default=8080,
        envvar="TIDEGATE_PORT",
        show_envvar=True,
        help="port to listen on, 0 for a free one",
    )(function)
    return option(
        "--host",
        default="127.0.0.1",
        envvar="TIDEGATE_HOST",
        show_envvar=True,
        help="address to listen on",
    )(function)


def _worker_options(function: _F) -> _F:
    choices: list[tuple[str, dict[str, Any]]] = [
        (
            "--model",
            {
                "type": Path,
                "metavar": "PATH",
                "help": "checkpoint directory, .gguf file, a name of tidegate models list, or"
                " scripted or a .toml file for known answers (the demo model)",
            },
        ),
        ("--model-name", {"metavar": "NAME", "help": "what clients call it (its directory)"}),
        (
            "--device",
            {"type": Choice(["cuda", "cpu"]), "help": "never falls back to another (cuda)"},
        ),
        (
            "--engine",
            {
                "type": Choice(_ENGINES),
                "help": "auto: vllm on CUDA where it is installed and has the model, llama.cpp's"
                " server for .gguf files, else torch; synthetic: made-up tokens (auto)",
            },
        ),
        ("--instances", {"type": Instances(), "default": 1, "help": "Tritons to run"}),
        (
            "--gpus",
            {
                "type": Words(),
                "default": (),
                "metavar": "ID,…",
                "help": "CUDA devices, dealt out to the instances in turn (all to each)",
            },
        ),
        (
            "--tensor-parallel",
            {
                "type": POSITIVE,
                "metavar": "N",
                "help": "GPUs over which each instance splits the model; vllm only (1)",
            },
        ),
        (
            "--slot",
            {"is_flag": True, "help": "render clips, too, in a Triton of their own (docs/slot.md)"},
        ),
        ("--no-llm", {"is_flag": True, "help": "no text model: clips only, with --slot"}),
    ]
    for name, settings in reversed(choices):
        function = option(name, section="The model", **settings)(function)
    return function


def _triton_options(ports: tuple[int, int, int]) -> Callable[[_F], _F]:
    choices: list[tuple[str, dict[str, Any]]] = [
        (
            "--triton",
            {
                "type": Path,
                "metavar": "PATH",
                "envvar": "TIDEGATE_TRITON",
                "show_envvar": True,
                "help": "a server to use: the binary, or the directory above bin/",
            },
        ),
        ("--triton-host", {"default": "127.0.0.1", "help": "where Triton listens"}),
        (
            "--triton-open",
            {
                "is_flag": True,
                "help": "off loopback, let whoever reaches Triton's ports generate without a token",
            },
        ),
        *(
            (
                f"--{name}-port",
                {
                    "type": PORT,
                    "default": usual,
                    "help": f"Triton's {name} port, 0 for a free one; the next instance's is 10 "
                    "higher",
                },
            )
            for name, usual in zip(("http", "grpc", "metrics"), ports, strict=True)
        ),
        (
            "--load-timeout",
            {
                "type": SECONDS,
                "default": 300.0,
                "metavar": "S",
                "help": "seconds that loading may take",
            },
        ),
        (
            "--drain",
            {
                "type": SECONDS,
                "default": 1.0,
                "metavar": "S",
                "help": "seconds that running work is given at the end",
            },
        ),
        ("--log-to-stderr", {"is_flag": True, "help": "logs to stderr, not to files"}),
        (
            "--state-file",
            {
                "type": Path,
                "metavar": "PATH",
                "help": "keep address, ports and process ids there as JSON while it serves",
            },
        ),
        ("--follow-parent", {"is_flag": True, "help": "end with the process that started this"}),
    ]

    def add(function: _F) -> _F:
        for name, settings in reversed(choices):
            function = option(name, section="Triton", **settings)(function)
        return function

    return add


@click.command(
    cls=Command,
    help=UP_DESCRIPTION,
    epilog=UP_EPILOG,
    short_help="start everything on this machine",
)
@_listening
@option("--cors-origins", metavar="ORIGIN,…", help=CORS_HELP)
@processes_option
@_worker_options
@_triton_options(ports=(0, 0, 0))
def up(cors_origins: str | None, **given: Any) -> int:
    if cors_origins is not None:
        os.environ["TIDEGATE_HTTP__CORS_ORIGINS"] = cors_origins  # the orchestrator inherits it
    return _launch(LaunchOptions(**given))


@click.command(
    cls=Command, help=WORKER_DESCRIPTION, epilog=UP_EPILOG, short_help="start Triton only"
)
@_worker_options
@_triton_options(ports=(8000, 8001, 8002))
def worker(**given: Any) -> int:
    return _launch(LaunchOptions(**given, serve=False))


def _launch(options: LaunchOptions) -> int:
    if options.no_llm and not options.slot:
        raise click.UsageError("--no-llm leaves nothing to serve without --slot")
    with importing():
        runtime.add_to_path()
        from tidegate.cli import launch  # imports the launcher, which other commands do without

    return launch.run(options)
