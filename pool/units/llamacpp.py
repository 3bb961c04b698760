"""Runs one llama.cpp server on loopback, instead of a Triton, for GGUF files. The server has its
own environment (``tidegate engines ensure llamacpp``). Orchestrators tokenize prompts themselves,
so this writes the file's vocabulary for them while the model loads.
"""

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Unpack
from urllib.parse import quote, urlencode

from catalog.errors import StartFailed
from pool.engines.environments import environment_if_made
from pool.engines.recipes import LLAMACPP_SERVER
from pool.process.http_get import get, http_status
from pool.process.ports import host_port
from pool.process.process import FoundRun, command_environment, run
from pool.supervise import ProcessUnit, UnitOptions
from protocol.gguf import find_gguf, gguf_name, is_gguf, parts_of, read_gguf
from worker.environment import with_variables
from worker.settings import WorkerSettings, variable

ENGINE: Final = "llamacpp"
HOST: Final = "127.0.0.1"
_ENGINE_VARIABLE: Final = variable("engine")
_HEEDED: Final = frozenset({"device", "engine_args", "max_running", "model_name", "model_path"})
"""Worker settings that apply to this server."""
_SLOTS: Final = 4
"""Default number of parallel jobs, the same as llama.cpp's own default."""
_CONTEXT: Final = 8192
"""Default context of a slot in tokens. Its KV cache is allocated at start."""
_BATCH: Final = {"cpu": "128", "cuda": "512"}
"""Prompt tokens per step: a cancel takes effect at the end of a step."""
_POLL_S: Final = 0.03


def is_asked_for(variables: Mapping[str, str], model: Path) -> bool:
    """Whether a worker's ``variables`` ask for llama.cpp, or its ``model`` requires it."""
    engine = variables.get(_ENGINE_VARIABLE, "auto")
    return engine == ENGINE or (engine == "auto" and is_gguf(model))


class LlamaCppServer(ProcessUnit):
    """A supervised server. It keeps its port across restarts, so that lanes reconnect."""

    def __init__(
        self,
        name: str,
        variables: Mapping[str, str],
        state_dir: Path,
        port: int,
        load_timeout_s: float = 300.0,
        **options: Unpack[UnitOptions],
    ) -> None:
        """``variables``: a worker's ``TIDEGATE_WORKER__…``, including its model. ``state_dir``
        has the engine, and a folder for each file's vocabulary."""
        super().__init__(name, **options)
        self.port = port
        self.start_s = load_timeout_s
        self._variables = variables
        self._state_dir = state_dir
        self._environment: Mapping[str, str] = {}
        """More variables for its process."""

    @property
    def all_ports(self) -> tuple[int, int, int]:
        return self.port, 0, 0

    @property
    def address(self) -> str:
        settings, file = _settings(self._variables)
        folder = _tokenizer(settings) or self._vocabulary(file)
        told = {"tokenizer": str(folder), "alias": settings.model_name or gguf_name(file)}
        return f"llamacpp+http://{host_port(HOST, self.port)}?{urlencode(told, quote_via=quote)}"

    @property
    def where(self) -> str:
        return f"HTTP on {host_port(HOST, self.port)}"

    def describe(self) -> dict[str, object]:
        """Port and process id, for tests and tools."""
        return {"name": self.name, "http_port": self.port, "pid": self.pid}

    async def start(self) -> None:
        """Start the server and wait for its model. Raises ``StartFailed`` with the reason."""
        settings, file, command = await asyncio.to_thread(self._plan)
        env = command_environment({**self._environment, "PYTHONPATH": None})
        writing = asyncio.create_task(self._write_vocabulary(settings, file))
        try:
            await self._spawn(command, env)
            await writing
        finally:
            writing.cancel()
        await self.resume()

    async def attach(self, found: FoundRun) -> None:
        self.port = found.ports[0]
        await super().attach(found)

    async def stop(self, drain_s: float) -> None:
        """Wait for its jobs, at most ``drain_s``, and end it. The server itself cannot drain."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle()
        await super().stop(drain_s)

    async def _answers(self) -> bool:
        return await http_status(HOST, self.port, "/health") == 200

    async def _idle(self) -> None:
        """Wait until no slot is busy, or the server stops answering."""
        while True:
            _, body = await get(HOST, self.port, "/slots")
            if b'"is_processing":true' not in body:
                return
            await asyncio.sleep(_POLL_S)

    def _vocabulary(self, file: Path) -> Path:
        """The folder with the vocabulary of a file, unless the operator chose a tokenizer."""
        digest = hashlib.sha256(bytes(file.resolve())).hexdigest()[:16]
        return self._state_dir / "gguf" / digest

    def _plan(self) -> tuple[WorkerSettings, Path, list[str]]:
        """The settings and the file of a start, and its command. Raises ``StartFailed``."""
        try:
            settings, file = _settings(self._variables)
            parts_of(file)
            trained = _trained_context(file)
        except (OSError, ValueError) as error:
            raise StartFailed(f"{self.name}: {error}") from None
        strangers = sorted(settings.model_fields_set - _HEEDED)
        if strangers:
            raise StartFailed(
                f"{self.name}: {', '.join(map(variable, strangers))}: not for llama.cpp's server,"
                f" which supports only {', '.join(sorted(_HEEDED))} of a worker's settings"
            )
        made = environment_if_made(ENGINE, self._state_dir, settings.device)
        if not made:
            raise StartFailed(
                f"{self.name}: {file.name} is run by llama.cpp's server, which is not installed"
                " here: tidegate engines ensure llamacpp"
            )
        slots = settings.max_running if "max_running" in settings.model_fields_set else _SLOTS
        params = {
            "n_parallel": str(slots),
            "n_ctx": str(slots * min(trained, _CONTEXT)),
            "n_batch": _BATCH[settings.device],
            **settings.engine_args,
        }
        params.pop("tokenizer", None)
        python = Path(made["VIRTUAL_ENV"]) / "bin" / "python"
        command = [str(python), "-P", str(LLAMACPP_SERVER), str(file.absolute()), str(self.port)]
        command += [settings.device, *(f"{name}={value}" for name, value in params.items())]
        return settings, file, command

    async def _write_vocabulary(self, settings: WorkerSettings, file: Path) -> None:
        if _tokenizer(settings):
            return
        # In its own process, because the code that reads vocabularies is in the worker.
        command = (sys.executable, "-P", "-m", "worker.models.gguf")
        status, said = await run(*command, str(file), str(self._vocabulary(file)))
        if status:
            raise StartFailed(f"{self.name}: {said}")


def _settings(variables: Mapping[str, str]) -> tuple[WorkerSettings, Path]:
    """A worker's settings except its engine, and its model file. Raises ``ValueError``."""
    told = {name: value for name, value in variables.items() if name != _ENGINE_VARIABLE}
    settings = with_variables(WorkerSettings, told)
    return settings, find_gguf(settings.model_path)


def _tokenizer(settings: WorkerSettings) -> Path | None:
    """The tokenizer's folder that the operator chose, if any."""
    stated = settings.engine_args.get("tokenizer")
    return Path(stated).expanduser() if stated else None


def _trained_context(file: Path) -> int:
    """The model's context length in tokens; ``_CONTEXT`` if the file does not state it."""
    values = read_gguf(file)
    context = values.get(f"{values.get('general.architecture')}.context_length")
    return context if isinstance(context, int) and context > 0 else _CONTEXT
