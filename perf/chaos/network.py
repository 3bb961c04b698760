"""A network of the run's own, in which what is on its way to a port is lost without a word.

Processes talk over loopback, so the run goes into a network namespace of its own: there the rule
that hands packets to this machine may stand behind one that swallows those of a port, in both
directions. Connections that were open see no FIN and no RST: they are half open until the rule is
gone. New ones fail. Root (CAP_SYS_ADMIN, CAP_NET_ADMIN) and ``ip`` are required.
"""

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

_CLONE_NEWNET = 0x4000_0000
_SET_UP = (
    "link set lo up",
    "rule add pref 100 lookup local",
    "rule del pref 0",
)
_TIMEOUT_S = 10.0


def enter() -> str:
    """Enter a network namespace, with all that is started from now on; call it before any thread
    starts. Returns why not, in words, where that is not allowed: then nothing has changed."""
    if shutil.which("ip") is None:
        return "there is no command ip (iproute2)"
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            return f"no network namespace: {os.strerror(ctypes.get_errno())}"
        why_not = next(filter(None, map(_ip, _SET_UP)), "") or _try_out()
        if why_not and libc.setns(outside, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot leave the network namespace")
        return why_not
    finally:
        os.close(outside)


@asynccontextmanager
async def lost(*ports: int) -> AsyncIterator[None]:
    """Lose everything from and to these ports of this machine during the body."""
    try:
        for rule in _rules(ports):
            await _must(f"rule add pref 10 {rule}")
        yield
    finally:
        for rule in _rules(ports):
            await _must(f"rule del pref 10 {rule}")


def _rules(ports: Sequence[int]) -> list[str]:
    return [f"ipproto tcp {end} {port} blackhole" for port in ports for end in ("dport", "sport")]


def _try_out() -> str:
    """Reason why rules by port do not work here, which a kernel may lack; empty where they do."""
    return next(
        filter(None, (_ip(f"rule {do} pref 10 {_rules([9])[0]}") for do in ("add", "del"))), ""
    )


async def _must(arguments: str) -> None:
    if why := await asyncio.to_thread(_ip, arguments):
        raise RuntimeError(why)


def _ip(arguments: str) -> str:
    """Run ``ip``; returns why it failed, empty where it went well."""
    done = subprocess.run(
        ["ip", *arguments.split()], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return f"ip {arguments}: {done.stderr.strip()}" if done.returncode else ""
