"""``tidegate up`` and ``tidegate worker``: their arguments."""

import argparse
import os
from pathlib import Path

from tidegate.cli import runtime
from tidegate.cli.arguments import Commands, instances, port, seconds
from tidegate.cli.interrupt import importing

UP_DESCRIPTION = """\
Start everything on this machine and keep it up: Triton with the model, and the orchestrator in
front of it. Prints the address and a curl line once it serves.

What happens:
  1. A Triton server is found: --triton, else /opt/tritonserver (the NGC image), else the one of a
     wheel, which is fetched where it was not yet.
  2. Triton and the orchestrator start together, each in a process group of its own, with their
     output in TIDEGATE_HOME/logs/HOST-PORT/ (16 MiB each and three earlier ones, for their owner
     only).
  3. Whatever dies is started again on the same ports; what keeps dying ends the run.
  4. Ctrl-C or SIGTERM: running work gets --drain seconds, then everything ends; no process and no
     shared memory is left, not even when this command is killed. A second Ctrl-C hurries it.
"""

UP_EPILOG = """\
examples:
  tidegate up --device cpu --port 9000
  tidegate up --model ~/models/Qwen3-0.6B --device cuda
  tidegate up --device cpu --engine synthetic-paced     made-up tokens, for benchmarks

environment:
  TIDEGATE_HOST, TIDEGATE_PORT    where it listens (as --host, --port)
  TIDEGATE_TOKEN                  ask this token of every client; needed to listen off loopback
  TIDEGATE_TRITON                 as --triton
  TIDEGATE_HOME                   logs and the wheel's Triton; ~/.local/share/tidegate, .tidegate in
                                  a checkout
  TIDEGATE_WORKER_…               settings of the worker (worker/settings.py): …_MAX_RUNNING, say
  TIDEGATE_…                      settings of the orchestrator (orchestrator/settings.py)

exit status: 0 ended as asked, 1 it could not go on (the reason is on stderr), 2 wrong usage,
130 the end was cut short by a second Ctrl-C, or it came before anything was started
"""

WORKER_DESCRIPTION = """\
Start Triton with the model, without an orchestrator: for a machine or container of its own.
Connect one to it with `tidegate serve --instances-at HOST:8001`.
Ends as `tidegate up` does: drain, SIGTERM, SIGKILL of what is left.
"""


def add_to(commands: Commands) -> None:
    """The commands and their arguments."""
    up = commands.add_parser(
        "up", help="start everything on this machine", description=UP_DESCRIPTION, epilog=UP_EPILOG
    )
    up.set_defaults(run=_launch, serve=True)
    _add_listening(up, "TIDEGATE_HOST", "TIDEGATE_PORT")
    _add_worker(up)
    _add_triton(up, ports=(0, 0, 0))

    worker = commands.add_parser(
        "worker", help="start Triton only", description=WORKER_DESCRIPTION, epilog=UP_EPILOG
    )
    worker.set_defaults(run=_launch, serve=False)
    _add_worker(worker)
    _add_triton(worker, ports=(8000, 8001, 8002))


def _launch(args: argparse.Namespace) -> int:
    with importing():
        runtime.add_to_path()
        from tidegate.cli import launch  # imports the launcher, which other commands do without

    return launch.run(args, serve=args.serve)


def _add_listening(parser: argparse.ArgumentParser, host_env: str, port_env: str) -> None:
    parser.add_argument(
        "--host",
        default=os.environ.get(host_env, "127.0.0.1"),
        help=f"address to listen on ({host_env}, %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=port,
        default=os.environ.get(port_env, "8080"),
        help=f"port to listen on, 0 for a free one ({port_env}, %(default)s)",
    )


def _add_worker(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--model", type=Path, metavar="PATH", help="checkpoint directory (the demo model)"
    )
    group.add_argument("--model-name", metavar="NAME", help="what clients call it (its directory)")
    group.add_argument(
        "--device", choices=["cuda", "cpu"], help="never falls back to another (cuda)"
    )
    group.add_argument(
        "--engine",
        choices=["torch", "synthetic-free", "synthetic-paced"],
        help="synthetic: made-up tokens, for benchmarks (torch)",
    )
    group.add_argument(
        "--instances", type=instances, default=1, help="Tritons to run (%(default)s)"
    )
    group.add_argument(
        "--gpus",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=(),
        metavar="ID,…",
        help="CUDA devices, dealt out to the instances in turn (all to each)",
    )


def _add_triton(parser: argparse.ArgumentParser, ports: tuple[int, int, int]) -> None:
    group = parser.add_argument_group("Triton")
    group.add_argument(
        "--triton",
        type=Path,
        metavar="PATH",
        default=os.environ.get("TIDEGATE_TRITON") or None,
        help="a server to use: the binary, or the directory above bin/ (TIDEGATE_TRITON)",
    )
    group.add_argument(
        "--triton-host", default="127.0.0.1", help="where Triton listens (%(default)s)"
    )
    group.add_argument(
        "--triton-open",
        action="store_true",
        help="off loopback, let whoever reaches Triton's ports generate without a token",
    )
    for name, usual in zip(("http", "grpc", "metrics"), ports, strict=True):
        group.add_argument(
            f"--{name}-port",
            type=port,
            default=usual,
            help=f"Triton's {name} port, 0 for a free one; the next instance's is 10 higher "
            "(%(default)s)",
        )
    group.add_argument(
        "--load-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds that loading may take (%(default)g)",
    )
    group.add_argument(
        "--drain",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds that running work is given at the end (%(default)g)",
    )
    group.add_argument("--log-to-stderr", action="store_true", help="logs to stderr, not to files")
    group.add_argument(
        "--state-file",
        type=Path,
        metavar="PATH",
        help="keep address, ports and process ids there as JSON while it serves",
    )
    group.add_argument(
        "--follow-parent", action="store_true", help="end with the process that started this"
    )
