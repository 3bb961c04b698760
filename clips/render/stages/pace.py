"""Keeps a stage's steps in line with what the device has done, not what it was told to do."""

import torch


class Pace:
    """Called in each step: waits until the device has done what came before the last one.

    CUDA queues work. Without this a stage would reach its last step when the device has hardly
    begun, and after a cancel the device would still do all of it; with it, at most one step is
    queued while the next is being launched.
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
