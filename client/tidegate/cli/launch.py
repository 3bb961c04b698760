"""From the arguments of ``tidegate up`` and ``tidegate worker`` to a launch.

Imported after ``runtime.add_to_path``, which finds ``orchestrator`` and ``worker``.
"""

import os
import sys
from pathlib import Path

from orchestrator.pool import command
from orchestrator.pool.console import curl_line
from orchestrator.pool.engines.triton import TritonPorts
from orchestrator.pool.paths import DEMO_CHECKPOINT
from orchestrator.pool.spec import LaunchSpec
from tidegate.cli.options import LaunchOptions
from worker.models.folder import model_name, why_unservable

DEMO_MODEL_NAME = "demo"
_MODEL_PATH = "TIDEGATE_WORKER_MODEL_PATH"
_MODEL_NAME = "TIDEGATE_WORKER_MODEL_NAME"
_LANE_TOKEN = "TIDEGATE_LANE_TOKEN"
_WORKER_LANE_TOKEN = "TIDEGATE_WORKER_LANE_TOKEN"


def run(args: LaunchOptions) -> int:
    """Triton, and the orchestrator where that is asked for; the exit status."""
    worker_env = _worker_env(args)
    model_path = worker_env[_MODEL_PATH]
    if not os.path.isfile(os.path.join(model_path, "config.json")):
        print(
            f"tidegate: no model in {model_path}: expected a checkpoint directory in Hugging Face "
            "layout, with config.json; give one with --model PATH"
            f"\n{why_unservable(Path(model_path))}",
            file=sys.stderr,
        )
        return command.EXIT_FAILED
    try:
        lane_token = _lane_token(worker_env)
    except ValueError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return command.EXIT_FAILED
    spec = LaunchSpec(
        worker_env=worker_env,
        host=args.host,
        port=args.port,
        serve=args.serve,
        instances=args.instances,
        gpus=args.gpus,
        triton=args.triton,
        triton_host=args.triton_host,
        triton_open=args.triton_open,
        lane_token=lane_token,
        triton_ports=TritonPorts(args.http_port, args.grpc_port, args.metrics_port),
        load_timeout_s=args.load_timeout,
        drain_s=args.drain,
        log_to_stderr=args.log_to_stderr,
        state_file=args.state_file,
    )
    hint = None
    if args.serve:
        with_token = bool(os.environ.get("TIDEGATE_TOKEN"))
        name = worker_env.get(_MODEL_NAME) or model_name(Path(model_path))
        curl = curl_line("{url}", name, with_token=with_token)
        hint = f"try it in a browser: {{url}}/\nor:\n  {curl}"
    return command.run(spec, hint=hint, follow_parent=args.follow_parent)


def _lane_token(worker_env: dict[str, str]) -> str:
    """What the operator chose, taken out of ``worker_env``; empty where nothing was chosen."""
    ours, workers = os.environ.get(_LANE_TOKEN, ""), worker_env.pop(_WORKER_LANE_TOKEN, "")
    if ours and workers and ours != workers:
        raise ValueError(
            f"{_LANE_TOKEN} and {_WORKER_LANE_TOKEN} differ, so no lane could be opened: set one "
            "of them, or both to the same value"
        )
    return ours or workers


def _worker_env(args: LaunchOptions) -> dict[str, str]:
    """``TIDEGATE_WORKER_…``: what was asked for here, over the environment, over the demo model."""
    env = {key: value for key, value in os.environ.items() if key.startswith("TIDEGATE_WORKER_")}
    asked = {
        _MODEL_PATH: args.model and os.path.abspath(args.model),
        _MODEL_NAME: args.model_name,
        "TIDEGATE_WORKER_DEVICE": args.device,
        "TIDEGATE_WORKER_ENGINE": args.engine,
    }
    env |= {key: str(value) for key, value in asked.items() if value}
    if _MODEL_PATH not in env:
        env[_MODEL_PATH] = str(DEMO_CHECKPOINT)
        env.setdefault(_MODEL_NAME, DEMO_MODEL_NAME)
    return env
