"""Small files in the formats that models come in, made without any engine."""

import json
import struct
from collections.abc import Sequence

_F32 = 0


def safetensors(
    count: int = 1024, *, name: str = "weight", fill: int = 7, shape: Sequence[int] = ()
) -> bytes:
    """One tensor of ``count`` bytes."""
    header = json.dumps(
        {name: {"dtype": "U8", "shape": list(shape) or [count], "data_offsets": [0, count]}}
    ).encode()
    period = bytes(i * fill % 251 for i in range(251))
    content = (period * (count // 251 + 1))[:count]
    return struct.pack("<Q", len(header)) + header + content


def gguf(count: int = 256, *, license: str = "mit") -> bytes:
    """One tensor of ``count`` 32-bit floats, an array of words, and a license."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    words = b"".join(text(word) for word in ("a", "b", "c"))
    pairs = text("general.license") + struct.pack("<I", 8) + text(license)
    pairs += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + words
    pairs += text("general.alignment") + struct.pack("<II", 4, 32)
    tensor = text("weight") + struct.pack("<IQIQ", 1, count, _F32, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + pairs + tensor
    return header + b"\0" * (-len(header) % 32) + bytes(4 * count)


def checkpoint(weight_bytes: int = 4096) -> dict[str, bytes]:
    """The files of a checkpoint in Hugging Face layout, in content for nobody."""
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors(weight_bytes),
        "README.md": b"---\nlicense: apache-2.0\n---\n# A model\n",
    }
