"""The Triton model: hands requests to the worker and carries its answers back. Nothing else."""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

# Where `worker` is. The stub's interpreter takes no notice of this variable.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from worker import stub_abi
from worker.engine.build import build_engine
from worker.errors import ResponderLost
from worker.log import configure_logging
from worker.protocol import Code
from worker.service.call import Call, Tensors
from worker.service.worker import Worker
from worker.settings import read_settings
from worker.shared_memory import restrict_shared_memory

SWITCH_INTERVAL_S = 0.0005
"""Engine and emitter share this process: at Python's default of 5 ms each would wait that long for
the other, which is most of a decode step."""

Outgoing = Callable[[NDArray[Any]], NDArray[Any]]


class TritonPythonModel:
    """Lifecycle as Triton calls it. ``execute`` only hands over: a decoupled model may."""

    def initialize(self, args: dict[str, str]) -> None:
        configure_logging()
        restrict_shared_memory()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settings = read_settings()
        self._outgoing: Outgoing = lambda array: array
        if settings.legacy_stub and stub_abi.is_needed():
            stub_abi.install()
            self._outgoing = stub_abi.outgoing
        self._service = Worker(build_engine(settings), settings)
        # What is loaded stays: going over it takes the collector 50 to 270 ms, all jobs at a halt.
        gc.collect()
        gc.freeze()
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = TritonResponder(request.get_response_sender(), self._outgoing)
            try:
                call = Call(
                    inputs={tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                    parameters=json.loads(request.parameters() or "{}"),
                    request_id=request.request_id(),
                    responder=responder,
                )
            except ValueError:  # Triton passes bytes on in parameters and ids that are no UTF-8
                self._service.refuse(responder, "a parameter or the id is no Unicode text")
            else:
                self._service.accept(call)

    def finalize(self) -> None:
        self._service.close()


ERROR_CODES = {
    Code.INVALID_REQUEST: "INVALID_ARG",
    Code.CONTEXT_OVERFLOW: "INVALID_ARG",
    Code.DEADLINE_EXCEEDED: "CANCELLED",
    Code.CANCELLED: "CANCELLED",
    Code.CLIENT_DISCONNECTED: "CANCELLED",
    Code.NO_CAPACITY: "UNAVAILABLE",
    Code.DRAINING: "UNAVAILABLE",
    Code.LANE_CLOSED: "UNAVAILABLE",
    Code.UNAUTHENTICATED: "INVALID_ARG",
}
"""By name: the stub adds ``TritonError`` to its module only after it has imported this one. Triton
has no code for a missed deadline; the message always begins with ours."""


class TritonResponder:
    """``Responder`` over Triton's response sender."""

    def __init__(self, sender: Any, outgoing: Outgoing) -> None:
        self._sender = sender
        self._outgoing = outgoing
        self._ended = False

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        outputs = [pb_utils.Tensor(name, self._outgoing(v)) for name, v in tensors.items()]
        self._send(pb_utils.InferenceResponse(outputs), final=final)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            with contextlib.suppress(Exception):  # the request is dead, which nobody has to hear
                self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, code: Code, message: str) -> None:
        triton_code = getattr(pb_utils.TritonError, ERROR_CODES.get(code, "INTERNAL"))
        error = pb_utils.TritonError(f"{code.value}: {message}", triton_code)
        with contextlib.suppress(ResponderLost):  # nobody is left to tell
            self._send(pb_utils.InferenceResponse(error=error), final=True)

    def is_cancelled(self) -> bool:
        return not self._ended and bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        if self._ended:
            return
        self._ended = final
        try:
            if final:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                self._sender.send(response)
        except Exception as error:
            self._ended = False
            self.close()  # a request without FINAL would keep Triton from ever stopping
            raise ResponderLost(str(error)) from error
