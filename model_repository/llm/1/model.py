"""The Triton model: passes requests to the worker, and returns its answers."""

import gc
import os
import sys
import time
from typing import Any

import triton_python_backend_utils as pb_utils

# Objects created during the load stay alive, except for some from compilers. The usual frequency
# of garbage collections would make the load slow.
USUAL_COLLECTIONS = gc.get_threshold()
gc.set_threshold(100_000, 20, 20)

# PYTHONPATH says where `worker` is, but the stub's interpreter ignores it.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from worker.engines import load_engine
from worker.runner.xid_watch import gpu_fault_of
from worker.service.failure import STEP_TIMEOUT_S, ProcessGuard
from worker.service.triton_request import hand_over, prepare_process
from worker.service.worker import Worker
from worker.settings import read_settings

SWITCH_INTERVAL_S = 0.0005
"""Seconds between thread switches. Engine and emitter share this process. With Python's default of
5 ms, each would wait that long for the other, which is most of a decode step."""

GUARD_TIMES = 2
"""A stalled process is ended after this many times ``STEP_TIMEOUT_S``."""


class TritonPythonModel:
    """The model's life cycle as Triton calls it. ``execute`` only hands over (decoupled)."""

    def initialize(self, args: dict[str, str]) -> None:
        self._outgoing = prepare_process()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settings = read_settings()
        guard = ProcessGuard(GUARD_TIMES * STEP_TIMEOUT_S, time.monotonic)
        loaded = load_engine(settings)
        self._service = Worker(loaded, settings, guard=guard, device_fault=gpu_fault_of(settings))
        # Loaded objects stay: traversing them would stop all jobs for 50 to 270 ms per collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*USUAL_COLLECTIONS)
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        hand_over(requests, self._service, self._outgoing, pb_utils)

    def finalize(self) -> None:
        self._service.close()
