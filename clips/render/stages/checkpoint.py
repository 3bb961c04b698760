"""Helpers for providers with weights: folders, precisions, bytes that stay in memory, pace."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from clips.render.memory import Resident
from worker.encoding import openable
from worker.errors import BrokenCheckpoint, LoadError
from worker.extras import pip_install

Precision = Literal["fp32", "fp16", "bf16"]

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

_MAX_SAID = 300
"""Most characters quoted of a library's message: some name every weight that does not fit."""


def open_folder(folder: str, setting: str, what: str, files: Sequence[str | Sequence[str]]) -> Path:
    """The path of ``folder``, if it has all ``files``; of a group of alternatives, one is enough.

    Raises ``LoadError`` that names ``setting`` and every file which is missing.
    """
    if not folder:
        raise LoadError(f"{setting} is not set: it must be a folder with {what}")
    path = openable(Path(folder).expanduser())
    if not path.is_dir():
        raise BrokenCheckpoint(f"{setting}: {path} is not a folder; it must have {what}")
    choices = [[each] if isinstance(each, str) else list(each) for each in files]
    missing = [
        " or ".join(names) for names in choices if not any((path / name).exists() for name in names)
    ]
    if missing:
        raise BrokenCheckpoint(f"{setting}: {path} lacks {', '.join(missing)} of {what}")
    return path


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises over the files in ``path`` into ``BrokenCheckpoint``."""
    try:
        yield
    except (LoadError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        said = said if len(said) <= _MAX_SAID else f"{said[:_MAX_SAID]} …"
        raise BrokenCheckpoint(f"{path}: {said}") from error


def need_all(path: Path, missing: Iterable[str]) -> None:
    """Raise ``BrokenCheckpoint`` where weights are ``missing``: a library would make them up."""
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise BrokenCheckpoint(f"{path} lacks the weights {', '.join(names[:3])}{more}")


def not_installed(provider: str, extra: str, error: ImportError) -> LoadError:
    """The error to raise when a provider's library cannot be imported."""
    return LoadError(f"the provider {provider} needs {error.name}: {pip_install(extra)}")


def resident(name: str, modules: Iterable[Any], precision: str) -> Resident:
    """The bytes of all parameters and buffers of ``modules``, as they are stored."""
    tensors: dict[int, int] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            for part in (tensor, *_scales(tensor)):
                if part.numel():
                    tensors[part.data_ptr()] = part.numel() * part.element_size()
    return Resident(name, sum(tensors.values()), precision)


def _scales(tensor: Any) -> list[torch.Tensor]:
    """Tensors that bitsandbytes stores with a four-bit weight."""
    found, state = [], getattr(tensor, "quant_state", None)
    while state is not None:
        found += [state.absmax, state.code]
        state = state.state2
    return found


class Pace:
    """Called in each step: waits until the device has done the step before the last one. CUDA
    queues work: without this a stage would reach its last step while the device has barely started,
    and a cancel would not stop the queued work. With it, at most one step is queued while the next
    is being launched.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def __call__(self) -> None:
        if not self._is_cuda:
            return
        if self._last is not None:
            self._last.synchronize()
        self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record()
