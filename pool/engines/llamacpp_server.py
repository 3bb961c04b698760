"""Runs llama.cpp's own HTTP server, from the wheel ``xllamacpp``, on loopback::

    python llamacpp_server.py FILE.gguf PORT cuda|cpu [NAME=VALUE …]

Runs on the Python of that engine's environment and imports nothing else. ``NAME`` is a field of the
wheel's ``CommonParams``, or ``n_threads``.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import xllamacpp


def main() -> None:
    file, port, device, stated = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    os.chdir(file.parent)  # the server reports the path that it was given
    params = xllamacpp.CommonParams()
    params.model.path = file.name
    params.hostnames, params.port = ["127.0.0.1"], port
    params.ui, params.endpoint_metrics, params.use_jinja = False, True, True
    if device == "cpu":
        params.n_gpu_layers = 0
    elif not _has_gpu():
        sys.exit(
            "device 'cuda' cannot be used: this llama.cpp has no GPU; build it for one (tidegate"
            " engines ensure llamacpp --device cuda --from-source), or ask for the CPU: tidegate up"
            " --device cpu"
        )
    for pair in stated:
        name, _, value = pair.partition("=")
        if name == "n_threads":
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(value)
        else:
            setattr(params, name, _read(params, name, value))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


def _has_gpu() -> bool:
    kinds = xllamacpp.ggml_backend_dev_type
    gpus = (kinds.GGML_BACKEND_DEVICE_TYPE_GPU, kinds.GGML_BACKEND_DEVICE_TYPE_IGPU)
    return any(device["type"] in gpus for device in xllamacpp.get_device_info())


def _read(params: Any, name: str, value: str) -> object:
    """``value`` with the type of the field. Exits if it cannot be converted."""
    known = getattr(params, name, None)
    if not isinstance(known, int | float | str):  # a bool is an int
        sys.exit(f"{name}: llama.cpp's server has no number, string or flag of this name")
    try:
        if isinstance(known, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(known)(value)
    except (KeyError, ValueError):
        sys.exit(f"{name}={value}: expected a value such as {known!r}")


if __name__ == "__main__":
    main()
