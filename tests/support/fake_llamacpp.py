"""An environment of the engine llamacpp whose server is a stand-in of a few lines."""

import sys
from pathlib import Path

from catalog.engines import EngineCatalog, EngineEntry

_MODULE = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as Of


class CommonParams:
    def __init__(self):
        self.model = Of(path="")
        self.cpuparams, self.cpuparams_batch = Of(n_threads=-1), Of(n_threads=-1)
        self.hostnames, self.port = [], 0
        self.ui = self.use_jinja = True
        self.endpoint_metrics = self.kv_unified = False
        self.n_gpu_layers, self.n_parallel, self.n_ctx, self.n_batch = -1, 1, 0, 2048
        self.rope_freq_base = 0.0


class ggml_backend_dev_type:
    GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU = 1, 2


def get_device_info():
    return [{"name": "CPU", "type": 0}]


class Server:
    def __init__(self, params):
        if open(params.model.path, "rb").read(4) != b"GGUF":
            sys.exit("no model")
        told = {k: v for k, v in vars(params).items() if not isinstance(v, Of)}
        told |= {"threads": params.cpuparams.n_threads, "path": params.model.path}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = [] if self.path == "/slots" else told
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        server = ThreadingHTTPServer(("127.0.0.1", params.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = "here"
"""


def install(home: Path) -> None:
    """Register it below the state folder ``home``."""
    folder = home / "engines" / "llamacpp-cpu-1"
    (folder / "bin").mkdir(parents=True)
    (folder / "xllamacpp.py").write_text(_MODULE)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    EngineCatalog(home).put(
        EngineEntry(
            id="llamacpp-cpu-1",
            engine="llamacpp",
            version="1",
            build_ref="pip xllamacpp",
            created_ms=1,
            binary=str(python),
        )
    )
