"""Finds the Triton server to run, builds its command line, and requires that it asks its clients
for a token or listens on loopback only (OR-12).

The search order is: a configured path, the NGC image's ``/opt/tritonserver``, the wheel that
``triton_wheel`` unpacked. The first that exists is used. If that one cannot run here, the error
states the fix; it is never skipped silently.
"""

import contextlib
import os
import py_compile
import re
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from catalog.errors import EngineNotFound, NoEngine, PortsUnguarded
from catalog.hosts import is_loopback
from catalog.paths import NGC_ROOT, state_dir
from pool.engines import triton_wheel as wheel
from pool.preflight.host import check_stub_python, libpython_dir
from pool.process.guardian import SHARED_MEMORY
from pool.process.process import command_environment

if TYPE_CHECKING:
    from orchestrator.tls import Tls


Source = Literal["path", "ngc", "wheel"]

LOCKED = "shared-memory,model-repository,trace,logging"
"""Triton's protocols that clients must not use: load and unload models, map shared memory, and make
the server write files."""
_NO_HEADER = "no header\ncan carry this"
"""Header that a request for a locked protocol must send. Every local user could read a key in the
command line. HTTP and gRPC cannot send a line break in a header, so no client can send this one."""

PLAIN_TOKEN = "TIDEGATE_WORKER__PLAIN__TOKEN"


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A server that can be started with the running Python."""

    binary: Path
    backend_dir: Path
    """Parent of ``python/``, the backend with its stub."""
    library_path: tuple[Path, ...]
    """Folders that go in front of ``LD_LIBRARY_PATH``."""
    version: str
    """Version of the server, such as ``2.51.0``; ``unknown`` if the installation has none."""
    source: Source

    @property
    def legacy_stub(self) -> bool:
        """Whether its Python stub was built for numpy 1 (``worker.service.stub_abi`` fixes it)."""
        return self.source == "wheel"

    @property
    def description(self) -> str:
        """The server in words, such as ``Triton 2.51.0 from the wheel``."""
        origin = {"path": str(self.binary), "ngc": "the NGC image", "wheel": "the wheel"}
        return f"Triton {self.version} from {origin[self.source]}"


class TritonPorts(NamedTuple):
    """The ports of one server; in a request, 0 asks for a free port."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True)
class TritonSpec:
    """The models that one server serves, and how."""

    model_repository: Path
    models: tuple[str, ...]
    host: str = "127.0.0.1"
    load_timeout_s: float = 300.0
    env: Mapping[str, str] | None = None
    """More variables for the server and its models (``TIDEGATE_WORKER__…``)."""
    lane_token: str = field(default="", repr=False)
    """Token that its workers require to open a lane or to drain them; empty for none. It is passed
    in the environment, which only the same user can read."""
    tls: "Tls | None" = None
    """TLS for its gRPC port only; with ``ca``, clients must present a certificate."""
    is_locked: bool = True
    """Whether to lock the protocols of ``LOCKED``."""


def find_triton(configured: Path | None, home: Path, ngc_root: Path = NGC_ROOT) -> TritonInstall:
    """The server to run. ``configured`` is a binary, or a directory with the NGC image's layout.
    Raises ``EngineNotFound`` (``NoEngine`` if none was configured and there is none at all),
    ``MachineUnfit`` if the one found cannot run."""
    if configured is not None:
        root = configured.parent.parent if configured.is_file() else configured
        if not (root / "bin" / "tritonserver").is_file():
            raise EngineNotFound(
                f"No Triton server at {configured}: expected the tritonserver binary in a bin/ "
                "directory, or the directory above it, with backends/ next to bin/."
            )
        return _from_root(root.resolve(), "path")
    if (ngc_root / "bin" / "tritonserver").exists():
        return _from_root(ngc_root, "ngc")
    if wheel.is_prepared(home):
        return _from_wheel(home)
    raise NoEngine(
        f"No Triton server: none in {ngc_root}, and none from the wheel in {home}: tidegate up "
        "fetches one, as does make setup in a checkout; or give one with --triton PATH "
        "(TIDEGATE_TRITON)."
    )


def require_guard(
    host: str,
    models: Sequence[str],
    *,
    lane_token: str,
    plain_token: str,
    is_open: bool,
    opened_by: str,
) -> None:
    """Raise ``PortsUnguarded`` if other machines could reach a Triton that requires no token,
    unless the operator has allowed that with ``opened_by`` (``is_open``)."""
    if is_loopback(host):
        return
    lacking = []
    if not lane_token:
        lacking.append(
            "set TIDEGATE_LANES__TOKEN, to the same value for the orchestrator: every client that"
            " opens a lane must send it"
        )
    if not is_open and "slot" in models:
        lacking.append(
            f"the slot model asks for no token: {opened_by} lets every client that reaches "
            "Triton render clips"
        )
    elif not is_open and not plain_token:
        lacking.append(
            f"set {PLAIN_TOKEN}, which clients of Triton's own protocols then "
            f"state as the request parameter token, or let every client that reaches Triton "
            f"generate with {opened_by}"
        )
    if lacking:
        where = f"Triton would listen on {host or 'every address'}, which is not loopback"
        raise PortsUnguarded(f"{where}: {'; and '.join(lacking)}")


_KEEPALIVE_MS = 10_000
"""Milliseconds of silence before a lane is pinged, and the time limit for its answer."""


def triton_command(
    install: TritonInstall, spec: TritonSpec, ports: TritonPorts, shm_prefix: str
) -> list[str]:
    """The command line of a server. ``shm_prefix`` is the prefix of the names of its shared memory
    regions, and the server's id. Models must have a complete ``config.pbtxt``: auto-completion
    takes a second at every start."""
    # gRPC takes a URL's brackets, the HTTP library (libevhtp) a prefix
    evhtp_host = f"ipv6:{spec.host}" if ":" in spec.host else spec.host
    flags = {
        "model-repository": spec.model_repository,
        "backend-directory": install.backend_dir,
        "model-control-mode": "explicit",
        "http-address": evhtp_host,
        "http-port": ports.http,
        "grpc-address": f"[{spec.host}]" if ":" in spec.host else spec.host,
        "grpc-port": ports.grpc,
        # The longest time that an orchestrator that vanished holds its jobs' slots.
        "grpc-keepalive-time": _KEEPALIVE_MS,
        "grpc-keepalive-timeout": _KEEPALIVE_MS,
        "metrics-address": evhtp_host,
        "metrics-port": ports.metrics,
        "exit-timeout-secs": 2,
        "id": shm_prefix,
        **_tls_flags(spec.tls),
    }
    backend_config = {
        "shm-region-prefix-name": shm_prefix,
        "stub-timeout-seconds": round(spec.load_timeout_s),
    }
    locks = ("http-restricted-api", "grpc-restricted-protocol") if spec.is_locked else ()
    return [
        str(install.binary),
        "--disable-auto-complete-config",
        *(f"--{name}={value}" for name, value in flags.items()),
        *(f"--backend-config=python,{name}={value}" for name, value in backend_config.items()),
        *(f"--load-model={name}" for name in spec.models),
        *(f"--{name}={LOCKED}:tidegate-locked={_NO_HEADER}" for name in locks),
    ]


def _tls_flags(tls: "Tls | None") -> dict[str, object]:
    if tls is None or tls.certificate is None or tls.key is None:
        return {}
    shown = {"grpc-server-cert": tls.certificate.absolute(), "grpc-server-key": tls.key.absolute()}
    if tls.ca is None:
        return {"grpc-use-ssl": 1, **shown}
    return {"grpc-use-ssl-mutual": 1, **shown, "grpc-root-cert": tls.ca.absolute()}


def triton_environment(install: TritonInstall, spec: TritonSpec) -> dict[str, str]:
    """Our environment, plus variables that make the stub run the packages of the running Python. If
    ``spec.env`` has the variables of an engine's environment (``environment_if_made``), the stub
    runs the packages of that one."""
    return command_environment(
        {
            "PATH": _path_list(Path(sys.executable).parent, before="PATH"),
            "VIRTUAL_ENV": sys.prefix if sys.prefix != sys.base_prefix else None,
            "TIDEGATE_WORKER__CHOICES_PATH": str(state_dir() / "choices"),
            **(spec.env or {}),
            "LD_LIBRARY_PATH": _path_list(*install.library_path, before="LD_LIBRARY_PATH"),
            "PYTHONUNBUFFERED": "1",
            "TIDEGATE_LEGACY_STUB": "1" if install.legacy_stub else None,
            **({"TIDEGATE_WORKER__LANE_TOKEN": spec.lane_token} if spec.lane_token else {}),
        }
    )


def compile_models(spec: TritonSpec) -> None:
    """Write the models' ``__pycache__`` before the server reads the repository. Otherwise the stub
    writes it at its first start. Triton then sees the new file as a change of the model, and
    reloads it at the next ``load``."""
    for name in spec.models:
        for source in (spec.model_repository / name).glob("*/model.py"):
            tag = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            compiled = source.parent / "__pycache__" / tag
            if compiled.exists() and compiled.stat().st_mtime >= source.stat().st_mtime:
                continue  # another server may be using it
            with contextlib.suppress(OSError, py_compile.PyCompileError):  # the stub reports it
                py_compile.compile(str(source), str(compiled), doraise=True)


def _path_list(*first: Path, before: str) -> str:
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(before)])])


def _from_root(root: Path, source: Source) -> TritonInstall:
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    if not stub.is_file():
        raise EngineNotFound(
            f"The Triton server in {root} has no Python backend: expected {stub}; use an image "
            "or a build that has it."
        )
    _make_runnable(stub)
    check_stub_python(stub)
    version = root / "TRITON_VERSION"
    return TritonInstall(
        binary=root / "bin" / "tritonserver",
        backend_dir=root / "backends",
        library_path=_library_path(root / "lib", stub),
        version=version.read_text().strip() if version.is_file() else "unknown",
        source=source,
    )


def _from_wheel(home: Path) -> TritonInstall:
    backends = wheel.backend_dir(home)
    stub = backends / "python" / "triton_python_backend_stub"
    _make_runnable(stub)
    return TritonInstall(
        binary=wheel.server_dir(home) / "bin" / "tritonserver",
        backend_dir=backends,
        library_path=_library_path(wheel.wheel_dir(home) / "nvidia_pytriton.libs", stub),
        version=wheel.SERVER_VERSION,
        source="wheel",
    )


def _make_runnable(stub: Path) -> None:
    """Restore the permission to read and run the stub: if Triton cannot start a stub, it leaves it
    ``---x------``. Raises ``EngineNotFound`` if we may neither use nor change it."""
    mode, runnable = stat.S_IMODE(stub.stat().st_mode), 0o555
    if mode & runnable == runnable:
        return
    try:
        stub.chmod(mode | runnable)
    except OSError as error:
        if not os.access(stub, os.R_OK | os.X_OK):
            raise EngineNotFound(
                f"Triton's Python stub cannot be read and run by us: as its owner, chmod 755 "
                f"{shlex.quote(str(stub))}"
            ) from error


def _library_path(libraries: Path, stub: Path) -> tuple[Path, ...]:
    libpython = libpython_dir(stub)
    return (libraries,) if libpython is None else (libraries, libpython)


_PLAIN = re.compile(r"/[\w@%+=,./-]*", re.ASCII)


def is_plain(path: Path) -> bool:
    """Whether ``path`` needs no quoting in a shell, a directory list and an ASCII program."""
    return _PLAIN.fullmatch(str(path)) is not None


class Links:
    """Symbolic links for one start of a server; their names are ``prefix`` plus a purpose."""

    def __init__(self, prefix: str, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._prefix = prefix

    def to(self, path: Path, name: str) -> Path:
        """``path`` itself if it is plain, otherwise a new link to it. Raises ``OSError``."""
        if is_plain(path):
            return path
        link = self._folder / f"{self._prefix}{name}"
        link.symlink_to(path)
        return link

    def install(self, install: TritonInstall) -> TritonInstall:
        """``install`` with links for the directories in the shell's command."""
        backends = self.to(install.backend_dir, "backends")
        libraries = (self.to(p, f"libraries-{i}") for i, p in enumerate(install.library_path))
        return replace(install, backend_dir=backends, library_path=tuple(libraries))

    def spec(self, spec: TritonSpec) -> TritonSpec:
        """``spec`` with a link for its models."""
        return replace(spec, model_repository=self.to(spec.model_repository, "models"))

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` with links for the stub's imports: code, and the first Python's folder."""
        linked = dict(env)
        if code := _entries(env, "PYTHONPATH"):
            linked["PYTHONPATH"] = os.pathsep.join(
                str(self.to(Path(entry), f"code-{i}")) if os.path.isabs(entry) else entry
                for i, entry in enumerate(code)
            )
        first, *others = _entries(env, "PATH") or [""]
        if first and not is_plain(Path(first)):
            python = self.to(Path(first).parent, "python")
            linked["PATH"] = os.pathsep.join([str(python / Path(first).name), *others])
            if env.get("VIRTUAL_ENV") == str(Path(first).parent):
                linked["VIRTUAL_ENV"] = str(python)
        return linked


def _entries(env: Mapping[str, str], name: str) -> list[str]:
    return [entry for entry in env.get(name, "").split(os.pathsep) if entry]
