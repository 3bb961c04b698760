"""Triton's protobuf messages (``service_pb2``), without the client that they come with.

Importing ``tritonclient.grpc`` brings its client, gRPC's own and ``ml_dtypes``: a tenth of the
orchestrator's start, for what it does not use.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

_CLIENT = "tritonclient.grpc"


def _import_messages() -> Any:
    package = find_spec("tritonclient")
    if _CLIENT in sys.modules or package is None:
        from tritonclient.grpc import service_pb2

        return service_pb2
    # Stands for the package while its modules of messages are found; whoever wants the client
    # imports it as ever afterwards, with these messages.
    stand_in = ModuleType(_CLIENT)
    folders = package.submodule_search_locations or ()
    stand_in.__path__ = [str(Path(folder) / "grpc") for folder in folders]
    sys.modules[_CLIENT] = stand_in
    try:
        from tritonclient.grpc import service_pb2
    finally:
        del sys.modules[_CLIENT]
    return service_pb2


if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2
else:
    service_pb2 = _import_messages()

__all__ = ["service_pb2"]
