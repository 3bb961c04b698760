"""Makes a checkpoint for our own engine of a GGUF file, in a process of its own: what reads such
files is the worker's."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from catalog.errors import DamagedModel
from pool.process.process import command_environment

MADE: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_UNREAD: Final = 2
"""Exit status for a sound file of a model that our engine does not run."""


async def read_weights(
    file: Path, folder: Path, begins: Callable[[int], None], came: Callable[[int], None]
) -> str:
    """Write the model of ``file`` into ``folder`` in Hugging Face layout; returns why our engine
    does not read it, empty if it does.

    ``begins`` hears how many bytes of weights there will be, ``came`` how many more are there.
    Raises ``DamagedModel``, and what ``begins`` raises.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "worker.models.gguf", str(file), str(folder), "--weights"),
        env=command_environment({}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        told = begins
        async for line in process.stdout:
            told(int(line))
            told = came
        said = (await process.stderr.read()).decode(errors="replace").strip()
        status = await process.wait()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if status == _UNREAD:
        return said
    if status:
        raise DamagedModel(said)
    return ""
