"""The Triton model of the slot pipeline: passes recipes to the worker, and returns clips."""

import gc
import os
import sys
from typing import Any

import triton_python_backend_utils as pb_utils

# PYTHONPATH says where `worker` is, but the stub's interpreter ignores it.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from clips.render.build import build_clips
from clips.render.settings import read_clip_settings
from clips.render.worker import ClipWorker
from worker.service.triton_request import hand_over, prepare_process


class TritonPythonModel:
    """The model's life cycle as Triton calls it. ``execute`` only hands over (decoupled)."""

    def initialize(self, args: dict[str, str]) -> None:
        self._outgoing = prepare_process()
        self._worker: ClipWorker = build_clips(read_clip_settings())
        gc.collect()
        gc.freeze()
        self._worker.start()

    def execute(self, requests: list[Any]) -> None:
        hand_over(requests, self._worker, self._outgoing, pb_utils)

    def finalize(self) -> None:
        self._worker.close()
