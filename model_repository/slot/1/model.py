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
from worker.encoding import speak_utf8
from worker.log import configure_logging
from worker.service import stub_abi
from worker.service.triton_request import Outgoing, TritonResponder, call_of, restrict_shared_memory


class TritonPythonModel:
    """The model's life cycle as Triton calls it. ``execute`` only hands over (decoupled)."""

    def initialize(self, args: dict[str, str]) -> None:
        speak_utf8()
        configure_logging()
        restrict_shared_memory()
        settings = read_clip_settings()
        self._outgoing: Outgoing = lambda array: array
        if stub_abi.is_needed():
            stub_abi.install()
            self._outgoing = stub_abi.outgoing
        self._worker: ClipWorker = build_clips(settings)
        gc.collect()
        gc.freeze()
        self._worker.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = TritonResponder(request.get_response_sender(), self._outgoing, pb_utils)
            try:
                call = call_of(request, responder)
            except ValueError:
                self._worker.refuse(responder, "a parameter or the id is not valid Unicode text")
            else:
                self._worker.accept(call)

    def finalize(self) -> None:
        self._worker.close()
