"""Runs eSpeak NG in its own process, so that it can be killed when it hangs.

Started as ``python -I -S espeak_child.py LIBRARY DATA``, so that it is ready in some 20 ms: it
needs the standard library only. It writes its sample rate, then answers requests in order, and ends
with its standard input, even while the library computes.

::

    ─▶ {"voice": "en", "rate": 165, "pitch": 50, "room": 441000, "pieces": ["Good morning."]}\\n
    ◀─ n (int32), then n samples (int16), again and again; DONE or NO_VOICE ends it
"""

import ctypes
import json
import os
import queue
import resource
import sys
import threading
from typing import Any

DONE = 0
NO_VOICE = -1

_RETRIEVAL = 1
_UTF8 = 1
_PUNCTUATION_END = 0x1000
_RATE, _PITCH = 1, 3
_CHUNK_MS = 100
_MAX_MEMORY = 2**30

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def main(library_path: str, data_path: str) -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    library: Any = ctypes.CDLL(library_path)
    _write(library.espeak_Initialize(_RETRIEVAL, _CHUNK_MS, data_path.encode(), 0))
    while True:
        _serve(library, json.loads(requests.get()))


def _read(requests: "queue.SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)  # the parent is gone


def _write(head: int, samples: bytes = b"") -> None:
    left = memoryview(head.to_bytes(4, "little", signed=True) + samples)
    while left:
        left = left[os.write(1, left) :]


def _serve(library: Any, request: dict[str, Any]) -> None:
    if library.espeak_SetVoiceByName(request["voice"].encode()) != 0:
        _write(NO_VOICE)
        return
    library.espeak_SetParameter(_RATE, request["rate"], 0)
    library.espeak_SetParameter(_PITCH, request["pitch"], 0)
    made, room = 0, request["room"]

    def take(samples: Any, count: int, _events: Any) -> int:
        nonlocal made
        if count > 0:
            made += count
            _write(count, ctypes.string_at(samples, 2 * count))
        return int(made >= room)

    callback = _Callback(take)
    library.espeak_SetSynthCallback(callback)
    for piece in request["pieces"]:
        data = piece.encode()
        library.espeak_Synth(
            ctypes.c_char_p(data),
            ctypes.c_size_t(len(data) + 1),
            *(0, 0, 0, _UTF8 | _PUNCTUATION_END, None, None),
        )
        library.espeak_Synchronize()
        if made >= room:
            break
    _write(DONE)


if __name__ == "__main__":
    main(*sys.argv[1:])
