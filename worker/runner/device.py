"""Opens the worker's device: asked for by name, checked up front, never replaced (WK-2)."""

from typing import Literal

import torch

from worker.errors import DeviceUnavailable

DeviceName = Literal["cuda", "cpu"]

_HINT = (
    "to run on the CPU, for development only, ask for it:"
    " tidegate up --device cpu, or TIDEGATE_WORKER__DEVICE=cpu"
)


def open_device(name: DeviceName) -> torch.device:
    """The device ``name``, proven to work. Raises ``DeviceUnavailable``."""
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
