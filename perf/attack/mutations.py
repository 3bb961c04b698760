"""Values that break parsers, and ways to bend valid requests."""

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from perf.attack.target import SECRET

_NUMBERS = (-1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308, 3.7)
_TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "\ufdd0",
    "﷽",
    "a" * 100_000,
    "<|im_end|>",
    "ü",
    "🐯" * 50,
    "../..",
)
_OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"a": {"b": []}})


def value(rng: random.Random) -> Any:
    """A value that a field hardly expects."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(_TEXTS)
    if kind == 2:
        return deepcopy(rng.choice(_OTHERS))
    if kind == 3:
        return [value(rng) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice(("type", "role", "content", "text", "x")): value(rng)}
    return rng.choice((float("nan"), float("inf"), -float("inf")))


def body(rng: random.Random, valid: Mapping[str, Any]) -> bytes:
    """A valid body bent in one to three places, as bytes."""
    bent = json.loads(json.dumps(valid))
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*bent, "unknown", ""]) if bent else "unknown"
        action = rng.randrange(4)
        if action == 0:
            bent.pop(key, None)
        elif action == 1 and isinstance(bent.get(key), list) and bent[key]:
            at = rng.randrange(len(bent[key]))
            bent[key][at] = value(rng)
        elif action == 2 and isinstance(bent.get(key), dict):
            bent[key][rng.choice(("type", "x", ""))] = value(rng)
        else:
            bent[key] = value(rng)
    data = json.dumps(bent, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    action = rng.randrange(12)
    if action == 0:
        return data[: rng.randrange(len(data))]
    if action == 1:
        return flipped(rng, data)
    if action == 2:
        depth = rng.choice((10, 1000, 100_000))
        return b'{"prompt":' + b"[" * depth + b"]" * rng.choice((depth, 0)) + b"}"
    if action == 3:
        return b"\xef\xbb\xbf" + data
    if action == 4:
        return data[:-1] + b',"prompt":"' + SECRET.encode() + b'"}'  # a key twice
    return data


def flipped(rng: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes changed, dropped or inserted."""
    bent = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not bent:
            break
        at = rng.randrange(len(bent))
        action = rng.randrange(4)
        if action == 0:
            bent[at] = rng.randrange(256)
        elif action == 1:
            del bent[at : at + rng.randint(1, 8)]
        elif action == 2:
            bent[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        else:
            bent[at:at] = rng.choice((b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\r\n\r\n"))
    return bytes(bent)
