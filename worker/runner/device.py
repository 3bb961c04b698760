"""Opens the worker's device: requested by name, checked up front, never replaced (WK-2)."""

import os
from typing import Final, Literal

import torch

from worker.errors import DeviceUnavailable
from worker.models.blocked import blocks_fit
from worker.models.config import ModelConfig
from worker.models.model import parameter_count
from worker.settings import WorkerSettings

DeviceName = Literal["cuda", "cpu"]

_HINT = (
    "to run on the CPU, for development only, ask for it:"
    " tidegate up --device cpu, or TIDEGATE_WORKER__DEVICE=cpu"
)


def open_device(name: DeviceName) -> torch.device:
    """The device ``name``, after a test computation. Raises ``DeviceUnavailable``."""
    if name == "cpu":
        return torch.device("cpu")
    problem = _cuda_problem()
    if problem is not None:
        raise DeviceUnavailable(f"device 'cuda' cannot be used: {problem}; {_HINT}")
    return torch.device("cuda", torch.cuda.current_device())


def _cuda_problem() -> str | None:
    if torch.version.cuda is None:
        return (
            f"this build of torch ({torch.__version__}) has no CUDA support;"
            " install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no usable GPU;"
            " check that nvidia-smi lists one, that its driver is recent enough, and that"
            " CUDA_VISIBLE_DEVICES does not hide it"
        )
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        return f"a first computation on the GPU failed ({str(error).splitlines()[0]})"
    return None


SMALL_BYTES: Final = 64 * 2**20
"""Bytes of weights (as float32) below which a layer finishes before a second thread wakes up, and
oneDNN's call overhead exceeds the gain from half the bytes. Our own products are faster than
float32 (demo model, one thread): with AMX 1.2 times the steps at 1 row, 1.9 at 8 and at 32; with
AVX-512 alone (Intel, 1 MiB of L2 cache per core) 1.1, 1.3 and 1.3 times the tokens."""
_THREADS: Final = torch.get_num_threads()
"""torch's own choice of threads: one per core."""
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_dtype(
    settings: WorkerSettings, config: ModelConfig, device: torch.device
) -> torch.dtype:
    """The requested dtype; ``auto`` is the checkpoint's own dtype wherever that is fast.

    On a CPU, ``auto`` is bfloat16 if our own products read it in blocks (CPUs with AVX2 or more),
    or if the CPU has bfloat16 instructions and the caches do not hold the model. Otherwise it is
    float32. Measured without bfloat16 instructions (two cores, Intel with AVX-512, a 0.5B model,
    whole engine), relative to float32: 2.2 times the tokens at 1 row, 1.9 at 8, 1.4 at 32, and 0.9
    in a prompt of 512.
    """
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    own = _DTYPES[config.dtype]
    if device.type == "cuda":
        return own
    if own != torch.bfloat16:
        return torch.float32
    has_instructions = has_bfloat16() and not is_small(config)
    fast = has_instructions or blocks_fit(own)
    return own if fast else torch.float32


def set_threads(config: ModelConfig) -> None:
    """Set this process's number of threads, unless ``OMP_NUM_THREADS`` sets it."""
    if "OMP_NUM_THREADS" not in os.environ:
        # Set in both cases, because the previous model may have been small.
        torch.set_num_threads(1 if is_small(config) else _THREADS)


def is_small(config: ModelConfig) -> bool:
    """Whether the model is small enough for one thread."""
    return parameter_count(config) * torch.float32.itemsize < SMALL_BYTES


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16."""
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())
