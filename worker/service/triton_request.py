"""Wraps Triton's requests as ``Call`` and ``Responder``, and what both models of
``model_repository`` do in their process.

Only those models can import ``triton_python_backend_utils``; they pass it in.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from protocol import Code
from worker.encoding import speak_utf8
from worker.errors import ResponderLost
from worker.log import configure_logging
from worker.service import stub_abi
from worker.service.call import Call, Responder, Tensors

Outgoing = Callable[[NDArray[Any]], NDArray[Any]]
"""A function that converts an array before Triton gets it."""

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
"""Names of Triton's error codes: the stub adds ``TritonError`` to its module only after it has
imported the model. Triton has no code for a missed deadline; the message always begins with
ours."""


class Service(Protocol):
    """What serves a model's requests. Neither method raises: an error becomes the response."""

    def accept(self, call: Call) -> None: ...

    def refuse(self, responder: Responder, reason: str) -> None: ...


def prepare_process() -> Outgoing:
    """Set up the log, shared memory and numpy in Triton's stub."""
    speak_utf8()
    configure_logging()
    restrict_shared_memory()
    if not stub_abi.is_needed():
        return lambda array: array
    stub_abi.install()
    return stub_abi.outgoing


def hand_over(requests: list[Any], service: Service, outgoing: Outgoing, pb_utils: Any) -> None:
    """Pass Triton's requests to the service. ``pb_utils`` is Triton's module."""
    for request in requests:
        responder = TritonResponder(request.get_response_sender(), outgoing, pb_utils)
        try:
            call = Call(
                inputs={tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                parameters=json.loads(request.parameters() or "{}"),
                request_id=request.request_id(),
                responder=responder,
            )
        except ValueError:
            service.refuse(responder, "a parameter or the id is not valid Unicode text")
        else:
            service.accept(call)


class TritonResponder:
    """A ``Responder``. ``pb_utils`` is Triton's module."""

    def __init__(self, sender: Any, outgoing: Outgoing, pb_utils: Any) -> None:
        self._sender = sender
        self._outgoing = outgoing
        self._pb_utils = pb_utils
        self._ended = False

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        tensor = self._pb_utils.Tensor
        outputs = [tensor(name, self._outgoing(value)) for name, value in tensors.items()]
        self._send(self._pb_utils.InferenceResponse(outputs), final=final)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            with suppress(Exception):  # the request is already dead; no report needed
                self._sender.send(flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, code: Code, message: str) -> None:
        kind = self._pb_utils.TritonError
        error = kind(f"{code.value}: {message}", getattr(kind, ERROR_CODES.get(code, "INTERNAL")))
        with suppress(ResponderLost):  # the client is gone
            self._send(self._pb_utils.InferenceResponse(error=error), final=True)

    def is_cancelled(self) -> bool:
        return not self._ended and bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        if self._ended:
            return
        self._ended = final
        try:
            if final:
                flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                self._sender.send(response, flags=flags)
            else:
                self._sender.send(response)
        except Exception as error:
            self._ended = False
            self.close()  # a request without FINAL would keep Triton from ever stopping
            raise ResponderLost(str(error)) from error


SHARED_MEMORY = "/dev/shm/"
_FOR_OTHERS = 0o077


def restrict_shared_memory(
    maps: Path = Path("/proc/self/maps"), directory: str = SHARED_MEMORY
) -> None:
    """Remove other users' permissions from every shared region that this process maps."""
    with suppress(OSError):
        # address, permissions, offset, device, inode, path
        mapped = (line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines())
        for region in {line[5] for line in mapped if len(line) > 5}:
            if not region.startswith(directory):
                continue
            with suppress(OSError):  # gone, or another user's
                mode = os.stat(region).st_mode & 0o777
                if mode & _FOR_OTHERS:
                    os.chmod(region, mode & ~_FOR_OTHERS)
