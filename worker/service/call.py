"""One Triton request as plain data, so that only ``model_repository`` knows Triton."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol import Code
from worker.errors import InvalidCall

Tensors = Mapping[str, NDArray[Any]]


class Responder(Protocol):
    """Answers one request. Only the emitter's thread may touch it.

    Exactly one of ``send(final=True)``, ``close`` and ``fail`` ends it; later calls do nothing, and
    ``is_cancelled`` is then False without asking Triton (asking a sender that has ended crashes the
    whole server).
    """

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        """Send a response. Raises ``ResponderLost`` if Triton takes no more for this request."""

    def close(self) -> None:
        """End without data."""

    def fail(self, code: Code, message: str) -> None:
        """End with an in-band error, worded ``code: message``."""

    def is_cancelled(self) -> bool:
        """Whether the client disconnected or canceled. A round trip inside Triton: 45 to 70 µs."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its input tensors and parameters by name."""

    inputs: Tensors
    parameters: Mapping[str, str | int | bool | float]
    request_id: str
    responder: Responder

    def data(self, name: str) -> bytes | None:
        """The bytes of a STRING[1] input; None if the input is absent."""
        value = self._element(name)
        return value if value is None or isinstance(value, bytes) else str(value).encode()

    def text(self, name: str) -> str | None:
        """A STRING[1] input decoded as UTF-8; None if it is absent. Raises ``InvalidCall``."""
        value = self.data(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidCall(f"{name} is not valid UTF-8 (byte {error.start})") from None

    def flag(self, name: str) -> bool | None:
        """The element of a BOOL[1] input; None if the input is absent."""
        value = self._element(name)
        return None if value is None else bool(value)

    def _element(self, name: str) -> Any:
        tensor = self.inputs.get(name)
        if tensor is not None and tensor.size != 1:
            raise InvalidCall(f"{name} must have exactly one element, got {tensor.size}")
        return None if tensor is None else tensor.reshape(-1)[0]


def strings(*values: bytes | str) -> NDArray[np.object_]:
    """A STRING[n] output tensor."""
    return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)


def seconds(ms: float | None) -> float:
    """``ms`` in seconds; ``math.inf`` if it is None."""
    return math.inf if ms is None else ms / 1000
