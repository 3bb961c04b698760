"""Starts helper processes of the service, for work that would block its event loop."""

import asyncio
import os
import sys
from pathlib import Path


def bare_environment() -> dict[str, str]:
    """The environment without Tidegate's settings: helpers need none of its secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


async def start_helper(module: str) -> asyncio.subprocess.Process:
    """Start ``python -m module``, with pipes to its input and output. Raises ``OSError``."""
    environment = bare_environment()
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment | {"PYTHONPATH": path},
        start_new_session=True,  # only this process handles Ctrl-C
    )
