"""Runs one instance's llama.cpp server, detached, where its model is a GGUF file."""

import asyncio
from dataclasses import replace
from pathlib import Path

from catalog.errors import StartFailed
from pool.artifacts.resolve import resolve_model
from pool.fleet.home import InstanceRecord
from pool.fleet.member import OnStep, ports_of
from pool.fleet.specs import InstanceSpec
from pool.fleet.triton import TritonHost, visible_gpus
from pool.process.detached import DetachedProcess, DetachedStarter, Found
from pool.process.ports import free_ports, is_free, require_free
from pool.supervise import Keeping, first_of
from pool.units.llamacpp import HOST, LlamaCppServer, LlamaCppSpec
from worker.settings import variable

SERVER = "llamacpp"
"""Fact in the label of a run: what it is."""


class PoolLlamaCpp(LlamaCppServer):
    """The server of one instance (``member.PoolUnit``)."""

    def __init__(
        self, host: TritonHost, spec: InstanceSpec, model: Path, kept_port: int, on_step: OnStep
    ) -> None:
        start = DetachedStarter(host.home.path, spec.name, self._facts, on_step)
        variables = {**spec.settings, variable("model_path"): str(model)}
        super().__init__(
            spec.name,
            LlamaCppSpec(variables, host.state_dir, spec.load_timeout_s),
            kept_port,
            log=host.home.logs / f"{spec.name}.log",
            warn=host.warn,
            keeping=Keeping(start, host.heartbeat_s, lambda: on_step("started")),
        )
        self._host = host
        self._wanted = spec
        self._on_step = on_step
        self._group: tuple[str, ...] = ()
        self._told = ""

    @property
    def address(self) -> str:
        """The address as of the server's start: the model's file may be gone since."""
        return self._told

    async def start(self) -> None:
        host, spec = self._host, self._wanted
        model = await asyncio.to_thread(resolve_model, spec.model, host.state_dir)
        who = f"{self.name} {id(self)}"
        self._group = await host.gpus.take(who, spec, model)
        self._on_step("fits")
        try:
            self.port = self._choose_port()
            variables = {**self._spec.variables, variable("model_path"): str(model)}
            gpus = await visible_gpus(host, self._group)
            self._spec = replace(self._spec, variables=variables, environment=gpus)
            self._told = self._address()
            await super().start()
        finally:
            host.gpus.settle(who)

    async def attach(self, found: Found) -> None:
        self.port = ports_of(found)[0]
        group = found.label.facts.get("devices", "")
        self._group = tuple(group.split(",")) if group else ()
        self._process = await DetachedProcess.adopt(self.name, found, self._log)
        if self._wanted.model:
            self._told = self._address()

    async def lost(self) -> str:
        return await first_of(super().lost(), self._host.gpus.lost(self._group))

    def record(self) -> InstanceRecord:
        return InstanceRecord.of((self.port, 0, 0), self._process)

    def _address(self) -> str:
        try:
            return super().address
        except ValueError as error:
            raise StartFailed(f"{self.name}: {error}") from None

    def _facts(self) -> dict[str, str]:
        return {
            "digest": self._wanted.digest,
            "ports": str(self.port),
            "server": SERVER,
            "devices": ",".join(self._group),
        }

    def _choose_port(self) -> int:
        """The port asked for, otherwise its earlier one, or a free one. Raises ``PortInUse``."""
        asked, kept = self._wanted.ports.http, self.port
        if asked:
            require_free(HOST, asked, f"end what has it, or give {self.name} another port")
        return asked or (kept if kept and is_free(HOST, kept) else free_ports(1, HOST)[0])
