"""The command ``tidegate``."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130
MOST_INSTANCES = 128
"""On one machine."""

DESCRIPTION = """\
Deadline-keeping generation on NVIDIA Triton.

  tidegate up --device cpu               the demo model on this machine, no GPU needed
  tidegate up --model ~/models/llama     any Llama-family checkpoint directory, on the GPU
  tidegate up --instances 2 --gpus 0,1   two Tritons, one on each GPU
  tidegate chat                          talk to it
"""

UP_DESCRIPTION = """\
Start everything on this machine and keep it up: Triton with the model, and the orchestrator in
front of it. Prints the address and a curl line once it serves.

What happens:
  1. A Triton server is found: --triton, else /opt/tritonserver (the NGC image), else the one that
     `make setup` took out of a wheel.
  2. Triton and the orchestrator start together, each in a process group of its own, with their
     output in .tidegate/logs/PORT/ (16 MiB each and three earlier ones, for their owner only).
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
  TIDEGATE_HOME                   logs and the wheel's Triton; .tidegate in the checkout
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

SERVE_DESCRIPTION = """\
Start the orchestrator alone, for Tritons that run elsewhere.

  tidegate serve --instances-at 10.0.0.5:8001,10.0.0.6:8001
"""

CHAT_DESCRIPTION = """\
Talk to a model; the answer appears as it is generated.

  tidegate chat
  tidegate chat --url http://127.0.0.1:9000 --deadline-ms 2000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    try:
        args = _parser().parse_args(argv)
        status: int = args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


@contextmanager
def _importing() -> Iterator[None]:
    """Ctrl-C ends the process at once, since a module that is cut short may fail in its own way:
    numpy turns ``KeyboardInterrupt`` into an ``ImportError``."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored: so it stays
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _up(args: argparse.Namespace) -> int:
    with _importing():
        from client import launch  # imports the launcher, which chat and --help can do without

    return launch.up(args)


def _worker(args: argparse.Namespace) -> int:
    with _importing():
        from client import launch

    return launch.worker(args)


def _serve(args: argparse.Namespace) -> int:
    given = {"--host": args.host, "--port": args.port, "--instances": args.instances_at}
    options = [
        word for name, value in given.items() if value is not None for word in (name, str(value))
    ]
    # Ctrl-C waits until the orchestrator can handle it (orchestrator/__main__.py)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(sys.executable, [sys.executable, "-m", "orchestrator", *options])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _chat(args: argparse.Namespace) -> int:
    with _importing():
        import asyncio  # late, as all that takes long: Ctrl-C is handled from the first moment on

        from client import chat

    return asyncio.run(
        chat.run(
            args.url,
            args.model,
            args.token,
            args.deadline_ms,
            args.first_token_ms,
            args.token_gap_ms,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tidegate", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser(
        "up", help="start everything on this machine", description=UP_DESCRIPTION, epilog=UP_EPILOG
    )
    up.set_defaults(run=_up)
    _add_listening(up, "TIDEGATE_HOST", "TIDEGATE_PORT")
    _add_worker(up)
    _add_triton(up, ports=(0, 0, 0))

    worker = commands.add_parser(
        "worker", help="start Triton only", description=WORKER_DESCRIPTION, epilog=UP_EPILOG
    )
    worker.set_defaults(run=_worker)
    _add_worker(worker)
    _add_triton(worker, ports=(8000, 8001, 8002))

    serve = commands.add_parser(
        "serve", help="start the orchestrator only", description=SERVE_DESCRIPTION
    )
    serve.set_defaults(run=_serve)
    serve.add_argument("--host", help="address to listen on (TIDEGATE_HOST, 127.0.0.1)")
    serve.add_argument("--port", type=_port, help="port to listen on (TIDEGATE_PORT, 8080)")
    serve.add_argument(
        "--instances-at",
        metavar="HOST:PORT,…",
        help="gRPC addresses of the Tritons (TIDEGATE_INSTANCES, 127.0.0.1:8001)",
    )

    chat = commands.add_parser("chat", help="talk to a model", description=CHAT_DESCRIPTION)
    chat.set_defaults(run=_chat)
    chat.add_argument("--url", default="http://127.0.0.1:8080", help="server (%(default)s)")
    chat.add_argument("--model", help="a served model (the only one)")
    chat.add_argument(
        "--token", default=os.environ.get("TIDEGATE_TOKEN"), help="bearer token (TIDEGATE_TOKEN)"
    )
    chat.add_argument("--deadline-ms", type=_positive, help="give every answer this long")
    chat.add_argument("--first-token-ms", type=_positive, help="and its first token this long")
    chat.add_argument("--token-gap-ms", type=_positive, help="then a token at least this often")
    return parser


def _add_listening(parser: argparse.ArgumentParser, host_env: str, port_env: str) -> None:
    parser.add_argument(
        "--host",
        default=os.environ.get(host_env, "127.0.0.1"),
        help=f"address to listen on ({host_env}, %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=_port,
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
        "--instances", type=_instances, default=1, help="Tritons to run (%(default)s)"
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
    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        group.add_argument(
            f"--{name}-port",
            type=_port,
            default=port,
            help=f"Triton's {name} port, 0 for a free one; the next instance's is 10 higher "
            "(%(default)s)",
        )
    group.add_argument(
        "--load-timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="seconds that loading may take (%(default)g)",
    )
    group.add_argument(
        "--drain",
        type=_seconds,
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


class _Parser(argparse.ArgumentParser):
    """Keeps the line breaks of descriptions, in subcommands too."""

    def __init__(self, **options: object) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**options)  # type: ignore[arg-type]  # argparse's own options


def _port(text: str) -> int:
    number = _whole(text)
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"a port is from 0 to 65535, got {number}")
    return number


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _instances(text: str) -> int:
    number = _positive(text)
    if number > MOST_INSTANCES:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_INSTANCES}, got {number}")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):  # also catches NaN
        raise argparse.ArgumentTypeError(f"must be seconds from 0 up, got {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
