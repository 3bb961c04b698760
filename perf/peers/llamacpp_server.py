"""llama.cpp's own HTTP server, as the wheel ``xllamacpp`` has it.

    python -m perf.peers.llamacpp_server FILE.gguf PORT SLOTS CONTEXT

Runs where that wheel is, and needs nothing else. The model is called what its file is.
"""

import os
import signal
import sys
from pathlib import Path

import xllamacpp


def main() -> None:
    file, port, slots, context = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    os.chdir(file.parent)  # the server tells the path that it was given
    params = xllamacpp.CommonParams()
    params.model.path = file.name
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_parallel, params.n_ctx = slots, slots * context
    params.use_jinja = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
