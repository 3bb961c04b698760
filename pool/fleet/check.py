"""Plans for ``tidegate pool check``: what would be started, where, and what prevents it."""

from dataclasses import dataclass, replace
from pathlib import Path

from catalog.errors import NoEngine, ProvisionError, StartFailed
from pool.artifacts.resolve import resolve_model
from pool.engines.triton import find_triton
from pool.fleet.gpus import Gpus, need_bytes
from pool.fleet.specs import InstanceSpec, OrchestratorSpec, specs_of
from pool.pool_file import PoolFile
from pool.preflight.cpu import memory_free
from pool.preflight.need import GIB
from pool.preflight.nvml import GpuReader


@dataclass(frozen=True, slots=True)
class Planned:
    """One instance. ``problem`` is empty if it would start now."""

    name: str
    model: str
    path: str
    engine: str
    device: str
    need_gib: float | None
    ports: str
    problem: str


async def plan(file: PoolFile, state_dir: Path, reader: GpuReader) -> list[Planned]:
    """Plan everything that ``file`` asks for. Nothing is started; GPUs' memory is as of now, less
    what earlier instances in the list would take."""
    lacking = _triton_problem(file, state_dir)
    gpus = Gpus(reader, file.pool.heartbeat_s, lambda: 0.0, lambda uuid, reason: None)
    planned = []
    for spec in specs_of(file).values():
        if isinstance(spec, OrchestratorSpec):
            where = f"{spec.host}:{spec.port or 'chosen'}"
            planned.append(Planned(spec.name, "", "", "", "cpu", None, where, ""))
        else:
            one = await _planned(spec, state_dir, gpus)
            planned.append(replace(one, problem=one.problem or lacking))
    return planned


def _triton_problem(file: PoolFile, state_dir: Path) -> str:
    """Why no server could be started; empty if one could. A missing server is fetched."""
    try:
        find_triton(file.pool.triton, state_dir)
    except NoEngine:
        return ""
    except ProvisionError as error:
        return str(error)
    return ""


async def _planned(spec: InstanceSpec, state_dir: Path, gpus: Gpus) -> Planned:
    problem, path, need = "", "", None
    try:
        model = resolve_model(spec.model, state_dir)
    except ProvisionError as error:
        problem = str(error)
    else:
        path, need = str(model), need_bytes(spec, model)
        problem = await _lack(spec, model, need, gpus)
    return Planned(
        name=spec.name,
        model=spec.model,
        path=path,
        engine=spec.settings["TIDEGATE_WORKER__ENGINE"],
        device=",".join(spec.groups[0]) or "cpu",
        need_gib=None if need is None else round(need / GIB, 2),
        ports=" ".join(f"{name} {port or 'chosen'}" for name, port in spec.ports._asdict().items()),
        problem=problem,
    )


async def _lack(spec: InstanceSpec, model: Path, need: int, gpus: Gpus) -> str:
    if not spec.on_gpu:
        free = memory_free()
        if free is None or need <= free:
            return ""
        return f"it needs {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB of memory are free"
    try:
        await gpus.take(spec.name, spec, model)
    except StartFailed as error:
        return str(error)
    return ""
