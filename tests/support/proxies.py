"""Starts a real proxy with its recipe of docker/proxies, on loopback ports and with a certificate
of the tests."""

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pool.process.ports import free_ports
from tests.support.certificates import certificates
from tests.support.h2_client import H2Client

RECIPES = Path(__file__).parents[2] / "docker" / "proxies"
_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Kind:
    """One proxy program. ``{conf}`` in a command is the path of its configuration."""

    name: str
    recipe: str
    check: tuple[str, ...]
    run: tuple[str, ...]
    changes: Mapping[str, str]
    """What a test's configuration has in place of the recipe's own text: a port that nobody else
    has, and folders that any user may write to. ``{port}`` and ``{folder}`` are filled in."""

    @property
    def is_here(self) -> bool:
        return shutil.which(self.name) is not None


NGINX = Kind(
    "nginx",
    "nginx.conf",
    ("nginx", "-t", "-c", "{conf}"),
    ("nginx", "-g", "daemon off;", "-c", "{conf}"),
    {
        "user www-data;\n": "user root;\n" if os.geteuid() == 0 else "",
        "pid /run/nginx.pid;": "pid {folder}/nginx.pid;",
        "listen 443 ssl": "listen 127.0.0.1:{port} ssl",
        "http {\n": "http {\n"
        + "".join(
            f"    {kind}_temp_path {{folder}}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        ),
    },
)
HAPROXY = Kind(
    "haproxy",
    "haproxy.cfg",
    ("haproxy", "-c", "-f", "{conf}"),
    ("haproxy", "-db", "-f", "{conf}"),
    {"bind :443 ssl": "bind 127.0.0.1:{port} ssl"},
)
CADDY = Kind(
    "caddy",
    "Caddyfile",
    ("caddy", "validate", "--adapter", "caddyfile", "--config", "{conf}"),
    ("caddy", "run", "--adapter", "caddyfile", "--config", "{conf}"),
    {"https://llm.example {\n": "https://127.0.0.1:{port} {\n\tbind 127.0.0.1\n"},
)
KINDS = (NGINX, HAPROXY, CADDY)


@dataclass
class Proxy:
    """A proxy that runs, and whom it forwards to."""

    kind: Kind
    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[H2Client]:
        """One connection over TLS and HTTP/2."""
        trust = await asyncio.to_thread(
            ssl.create_default_context, cafile=certificates().ca.certificate
        )
        async with H2Client.connected("127.0.0.1", self.port, trust) as client:
            yield client


def configure(
    kind: Kind, folder: Path, port: int, upstreams: tuple[str, str], more: Mapping[str, str]
) -> Path:
    """Write the recipe as a test runs it; ``more`` are further changes, old text to new."""
    folder.mkdir(parents=True, exist_ok=True)
    made = certificates()
    (folder / "front.pem").write_bytes(made.server.pem + made.server.key_pem)
    (folder / "front.key").write_bytes(made.server.key_pem)
    text = (RECIPES / kind.recipe).read_text()
    for old, new in {
        **kind.changes,
        "/etc/tidegate/": "{folder}/",
        "127.0.0.1:8080": upstreams[0],
        "127.0.0.1:8081": upstreams[1],
        **more,
    }.items():
        assert old in text, f"{kind.recipe} has no {old!r} any more"
        text = text.replace(old, new.replace("{folder}", str(folder)).replace("{port}", str(port)))
    conf = folder / kind.recipe
    conf.write_text(text)
    return conf


def check(kind: Kind, conf: Path) -> None:
    """Have the proxy look at its configuration; it fails with what the proxy says."""
    done = subprocess.run(
        _filled(kind.check, conf), env=_environment(conf), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def running(
    kind: Kind, folder: Path, *upstreams: str, changes: Mapping[str, str] | None = None
) -> AsyncIterator[Proxy]:
    """Run the proxy before one or two upstreams (``http://host:port``); it ends with the block."""
    addresses = [url.removeprefix("http://") for url in upstreams]
    (port,) = await asyncio.to_thread(free_ports, 1)
    conf = await asyncio.to_thread(
        configure, kind, folder, port, (addresses[0], addresses[-1]), changes or {}
    )
    log = await asyncio.to_thread((folder / "log").open, "wb")
    process = await asyncio.create_subprocess_exec(
        *_filled(kind.run, conf), env=_environment(conf), stdin=-3, stdout=log, stderr=log
    )
    try:
        await _until_listening(process, port, folder / "log")
        yield Proxy(kind, port)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        log.close()


async def _until_listening(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            if process.returncode is not None:
                raise AssertionError(await asyncio.to_thread(log.read_text))
            await asyncio.sleep(0.02)


def _filled(command: tuple[str, ...], conf: Path) -> list[str]:
    return [part.replace("{conf}", str(conf)) for part in command]


def _environment(conf: Path) -> dict[str, str]:
    """Caddy keeps its state in the user's folders otherwise."""
    folders = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    return os.environ | {name: str(conf.parent) for name in folders}
