"""Keeps a stage's steps in line with what the device has done, not with what is queued."""

import torch


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
