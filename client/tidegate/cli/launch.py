"""Turns the arguments of ``tidegate up`` and ``worker`` into a launch.

Imported after ``runtime.add_to_path``, which finds ``orchestrator`` and ``worker``.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from catalog.errors import ProvisionError
from catalog.models import ModelCatalog
from catalog.paths import DEMO_CHECKPOINT, state_dir
from orchestrator.tls import SETTING, Tls, stated_tls
from pool import command
from pool.artifacts.packaged import list_packaged
from pool.artifacts.resolve import resolve_model
from pool.artifacts.staging import AddRequest
from pool.engines.environments import environment_if_made
from pool.engines.triton import TritonPorts
from pool.fleet.specs import SLOT_MODEL, LaunchSpec
from pool.preflight.host import check_slot
from pool.units.llamacpp import ENGINE as LLAMACPP
from protocol.gguf import find_gguf, is_gguf, parts_of
from tidegate.cli.models import bring
from worker.environment import unknown_variables
from worker.errors import UnsupportedModel
from worker.models.folder import model_name, why_unservable
from worker.models.gguf.file import GgufFile
from worker.settings import PREFIX, WorkerSettings, read_engine_args

if TYPE_CHECKING:
    from orchestrator.settings import Settings

TEXT_MODEL = "llm"
SLOT_DEFAULTS = {
    "cpu": {"SIZE": "384", "SECONDS": "15", "BUFFER_S": "2"},
    "cuda": {"SIZE": "512", "SECONDS": "45"},
}
"""Default maximum clip sizes by device. On two cores, a sentence then takes a second or two,
encoding included, and the buffers of two clips take 0.4 GB. On a GPU the sizes are those of SL-4;
the buffers take 2.1 GB."""
_MODEL_PATH = "TIDEGATE_WORKER__MODEL_PATH"
_MODEL_NAME = "TIDEGATE_WORKER__MODEL_NAME"
_DEVICE = "TIDEGATE_WORKER__DEVICE"
_ENGINE = "TIDEGATE_WORKER__ENGINE"
_TENSOR_PARALLEL = "TIDEGATE_WORKER__TENSOR_PARALLEL"
_ENGINE_ARGS = "TIDEGATE_WORKER__ENGINE_ARGS"
_IN_WORKERS = ("auto", "torch", "vllm")
_SCRIPTED = "synthetic-scripted"
_SLOT = "TIDEGATE_SLOT__"
_LANE_TOKEN = "TIDEGATE_LANES__TOKEN"
_WORKER_LANE_TOKEN = "TIDEGATE_WORKER__LANE_TOKEN"

_SAME = frozenset(each.name for each in fields(LaunchSpec)) - {"models", "tls", "lane_token"}
"""Options that a launch takes as they are."""


def run(*, serve: bool = True, cors_origins: str | None = None, **given: Any) -> int:
    """Launch the servers that ``tidegate up`` or ``worker`` asks for; return the exit status."""
    _allow_origins(cors_origins)
    try:
        worker_env = _worker_env(given)
        if not given["no_llm"]:
            _check_model(worker_env, serve=serve)
        slot_env = _slot_env(worker_env.get(_DEVICE, "cuda")) if given["slot"] else {}
        lane_token = _lane_token(worker_env)
        text = () if given["no_llm"] else (TEXT_MODEL,)
        spec = LaunchSpec(
            **{name: value for name, value in given.items() if name in _SAME},
            serve=serve,
            worker_env={**worker_env, **slot_env},
            models=(*text, SLOT_MODEL) if given["slot"] else text,
            gpus_each=_gpus_each(given["gpus"], worker_env),
            lane_token=lane_token,
            tls=_tls(),
            triton_ports=TritonPorts(*(given[f"{each}_port"] for each in TritonPorts._fields)),
        )
    except (ProvisionError, ValueError) as error:
        return _failed(error)
    hint = _hint(spec, worker_env) if serve else None
    return command.run(spec, hint=hint, follow_parent=given["follow_parent"])


def _allow_origins(cors_origins: str | None) -> None:
    if cors_origins is not None:  # the orchestrators inherit it
        os.environ["TIDEGATE_HTTP__CORS_ORIGINS"] = cors_origins


def _failed(error: Exception) -> int:
    print(f"tidegate: {error}", file=sys.stderr)
    return command.EXIT_FAILED


def _check_model(worker_env: Mapping[str, str], *, serve: bool) -> None:
    """Raise ``ValueError`` if a variable is unknown, or if the model cannot be served."""
    if lines := unknown_variables(WorkerSettings):
        raise ValueError("\n".join(lines))
    path = Path(worker_env[_MODEL_PATH])
    engine, args = worker_env.get(_ENGINE), worker_env.get(_ENGINE_ARGS)
    if engine == _SCRIPTED and args:
        from worker.runner.script import read_script

        read_script(Path(read_engine_args(args).get("script", "")))
    if engine != LLAMACPP:
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{why_unservable(path)}; --model takes a folder in Hugging Face layout, a .gguf"
                " file, or a name from tidegate models list (tidegate models add ORG/NAME downloads"
                " one)"
            )
        return
    parts_of(find_gguf(path))
    if not environment_if_made(LLAMACPP, state_dir()):
        raise ValueError(
            f"{path} is run by llama.cpp's server, which is not installed here: tidegate"
            " engines ensure llamacpp"
        )
    if not serve:
        raise ValueError(
            "tidegate worker starts Triton, but GGUF files are run by llama.cpp's server: use"
            " tidegate up, or start that server yourself and list it in TIDEGATE_INSTANCES"
            " (docs/engines.md)"
        )


def _hint(spec: LaunchSpec, worker_env: Mapping[str, str]) -> str:
    """Lines that suggest a first request, for when it serves."""
    bodies: dict[str, dict[str, object]] = {}
    if TEXT_MODEL in spec.models:
        name = worker_env.get(_MODEL_NAME) or model_name(Path(worker_env[_MODEL_PATH]))
        messages = [{"role": "user", "content": "Tell me a story."}]
        bodies["/v1/chat/completions"] = {"model": name, "messages": messages, "stream": True}
    if SLOT_MODEL in spec.models:
        bodies["/v2/slots"] = {"recipe": {"schema": "1.1", "text": "Good morning to everybody."}}
    with_token = bool(os.environ.get("TIDEGATE_TOKEN"))
    return "try it in a browser: {url}/{key}\nor:" + "".join(
        f"\n  {command.curl_line('{url}' + path, body, with_token=with_token)}"
        for path, body in bodies.items()
    )


def _lane_token(worker_env: dict[str, str]) -> str:
    """Remove the operator's lane token from ``worker_env`` and return it; empty if none is set.
    Raises ``ValueError`` if two tokens differ."""
    ours, workers = os.environ.get(_LANE_TOKEN, ""), worker_env.pop(_WORKER_LANE_TOKEN, "")
    if ours and workers and ours != workers:
        raise ValueError(
            f"{_LANE_TOKEN} and {_WORKER_LANE_TOKEN} differ, so no lane could be opened: set one "
            "of them, or both to the same value"
        )
    return ours or workers


def _gpus_each(gpus: Sequence[str], worker_env: Mapping[str, str]) -> int:
    """GPUs per instance. Raises ``ValueError`` if ``len(gpus)`` is not a multiple of it."""
    stated = worker_env.get(_TENSOR_PARALLEL, "")
    each = max(1, int(stated)) if stated.isdigit() else 1  # the worker refuses others
    if len(gpus) % each:
        raise ValueError(
            f"--gpus names {len(gpus)} GPUs, but each instance takes {each} (--tensor-parallel"
            f" {each}): name a multiple of {each}"
        )
    return each


def _tls() -> Tls | None:
    """TLS of Triton's gRPC port, or None. Raises ``ValueError``, which names the variable."""
    try:
        stated = stated_tls(os.environ.get(SETTING, ""))
        return None if stated is None else Tls.model_validate(stated)
    except ValidationError as error:
        said = error.errors()[0]
        where = "".join(f"{key}: " for key in said["loc"])
        raise ValueError(f"{SETTING}: {where}{said['msg'].removeprefix('Value error, ')}") from None
    except ValueError as error:
        raise ValueError(f"{SETTING}: {error}") from None


def _worker_env(given: Mapping[str, Any]) -> dict[str, str]:
    """``TIDEGATE_WORKER__…``: from the arguments, else the environment, else the demo model.

    Raises ``ProvisionError`` for a registered model that is not complete.
    """
    env = {key: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    model: Path | None = given["model"]
    asked = {
        _MODEL_PATH: model and os.path.abspath(model),
        _MODEL_NAME: given["model_name"],
        _DEVICE: given["device"],
        _ENGINE: given["engine"],
        _TENSOR_PARALLEL: given["tensor_parallel"],
    }
    env |= {key: str(value) for key, value in asked.items() if value}
    if model and not model.exists():  # an existing path wins over a registered name
        catalog = ModelCatalog(state_dir())
        registered = catalog.find(str(model))
        if registered is None and list_packaged(str(model)) is not None:
            registered = bring(catalog, AddRequest(str(model)))
        if registered is not None:
            env[_MODEL_PATH] = str(resolve_model(registered.id, state_dir()))
            env.setdefault(_MODEL_NAME, registered.name)
            if env.get(_ENGINE) == LLAMACPP and registered.gguf is not None:
                env[_MODEL_PATH] = str(catalog.path_of(registered) / registered.gguf)
    env = _with_script(env, model)
    if env.get(_ENGINE, "auto") in _IN_WORKERS and is_gguf(Path(env.get(_MODEL_PATH, ""))):
        env |= _of_gguf(find_gguf(Path(env[_MODEL_PATH])), env)
    if _MODEL_PATH not in env:
        env[_MODEL_PATH] = str(DEMO_CHECKPOINT)
        env.setdefault(_MODEL_NAME, "demo")
    return env


def _of_gguf(file: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables for a GGUF file: a checkpoint converted from it, or else llama.cpp's server.

    Raises ``ValueError`` if the requested worker engine cannot load it."""
    from worker.models.gguf.weights import plan_weights  # takes a third of a second

    try:
        plan_weights(GgufFile(file))
    except UnsupportedModel as error:
        if env.get(_ENGINE, "auto") != "auto":
            raise
        print(f"tidegate: {error}; llama.cpp's server will run it", file=sys.stderr)
        return {_ENGINE: LLAMACPP}
    entry = bring(ModelCatalog(state_dir()), AddRequest(str(file), any_name=True))
    path = str(resolve_model(entry.id, state_dir()))
    return {_MODEL_NAME: model_name(file), **env, _MODEL_PATH: path}


def _with_script(env: dict[str, str], asked: Path | None) -> dict[str, str]:
    """``env``. If the model is a script, or ``asked`` is ``scripted``: plus its engine, with the
    demo model's tokenizer and chat template."""
    path = Path(env.get(_MODEL_PATH, ""))
    is_file = path.suffix == ".toml" and path.is_file()
    if not is_file and (asked != Path("scripted") or path.exists()):
        return env
    named = {_MODEL_PATH: str(DEMO_CHECKPOINT), _ENGINE: _SCRIPTED}
    script = {_ENGINE_ARGS: json.dumps({"script": str(path)})} if is_file else {}
    return {_MODEL_NAME: path.stem} | env | named | script


def _slot_env(device: str) -> dict[str, str]:
    """``TIDEGATE_SLOT__…``: from the environment, else the text model's device and its
    ``SLOT_DEFAULTS``. Raises ``MachineUnfit`` if packages are missing.
    """
    env = {key: value for key, value in os.environ.items() if key.startswith(_SLOT)}
    check_slot(env.get(f"{_SLOT}SPEECH", "espeak"))
    defaults = SLOT_DEFAULTS.get(env.setdefault(f"{_SLOT}DEVICE", device), {})
    return {_SLOT + name: value for name, value in defaults.items()} | env


def _settings(**stated: str | int | None) -> "Settings":
    """The orchestrator's settings; stated values take precedence. Raises ``SystemExit``."""
    # Imported here, because the import takes a third of a second.
    from orchestrator.settings import InvalidSettings, load_settings

    try:
        return load_settings(**{k: v for k, v in stated.items() if v is not None})
    except InvalidSettings as error:
        print(f"Invalid settings:\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
