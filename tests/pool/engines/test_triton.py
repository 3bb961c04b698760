"""Which Triton is found, and how it is started."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from catalog.errors import EngineNotFound, MachineUnfit
from pool.engines import triton_wheel as wheel
from pool.engines.triton import (
    Links,
    TritonPorts,
    TritonSpec,
    compile_models,
    find_triton,
    is_plain,
    triton_command,
)
from tests.pool.engines.test_triton_wheel import unpack


def server_root(root: Path, stub: bytes = b"") -> Path:
    """A directory laid out like the NGC image's /opt/tritonserver."""
    for name in ("bin/tritonserver", "backends/python/triton_python_backend_stub"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(stub)
    (root / "TRITON_VERSION").write_text("2.63.0\n")
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    wheel.prepare(tmp_path / "home", unpack)
    return tmp_path / "home"


def test_a_configured_server_comes_first_then_ngcs_then_the_wheels(
    tmp_path: Path, home: Path
) -> None:
    mine, ngc = server_root(tmp_path / "mine"), server_root(tmp_path / "ngc")
    for configured in (mine, mine / "bin" / "tritonserver"):
        found = find_triton(configured, home, ngc)
        assert (found.source, found.version) == ("path", "2.63.0")
        assert found.binary == mine / "bin" / "tritonserver"
        assert found.backend_dir == mine / "backends"
    found = find_triton(None, home, ngc)
    assert (found.legacy_stub, found.description) == (False, "Triton 2.63.0 from the NGC image")
    found = find_triton(None, home, tmp_path / "none")
    assert (found.legacy_stub, found.backend_dir) == (True, wheel.backend_dir(home))
    assert found.description == f"Triton {wheel.SERVER_VERSION} from the wheel"


@pytest.mark.parametrize(
    ("configured", "said"),
    [
        ("", r"none in .*ngc.*make setup.*--triton PATH"),
        ("nowhere", "No Triton server at .*nowhere: expected"),
        ("bare", "no Python backend"),
        ("old", r"runs Python 3\.8"),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_never_replaced_by_another(
    tmp_path: Path, configured: str, said: str
) -> None:
    server_root(tmp_path / "old", b"libpython3.8.so.1.0")
    bare = server_root(tmp_path / "bare")
    (bare / "backends" / "python" / "triton_python_backend_stub").unlink()
    path = tmp_path / configured if configured else None
    with pytest.raises((EngineNotFound, MachineUnfit), match=said):
        find_triton(path, tmp_path / "home", tmp_path / "ngc")


def test_a_stub_that_triton_left_unreadable_is_mended(tmp_path: Path, home: Path) -> None:
    """It does so when it could not start it; the next one may be another user's run."""
    for root, found in (
        (server_root(tmp_path / "mine"), lambda root: find_triton(root, home)),
        (wheel.wheel_dir(home), lambda _: find_triton(None, home, tmp_path / "ngc")),
    ):
        stub = next(root.glob("backends*/python/triton_python_backend_stub"))
        stub.chmod(0o100)
        found(root)
        assert stub.stat().st_mode & 0o777 == 0o555


def test_what_is_no_clients_business_is_locked_without_a_key(home: Path, tmp_path: Path) -> None:
    """A key would stand in the command line; what no header can carry need not be kept secret."""
    install, ports = find_triton(None, home, tmp_path), TritonPorts(1, 2, 3)
    spec = TritonSpec(Path("/models"), ("llm",), lane_token="a-lane-token")
    command = triton_command(install, spec, ports, "x_")
    for option in ("http-restricted-api", "grpc-restricted-protocol"):
        (lock,) = [each for each in command if each.startswith(f"--{option}=")]
        protocols, _, key = lock.partition("=")[2].partition(":")
        assert protocols == "shared-memory,model-repository,trace,logging"
        assert "\n" in key.partition("=")[2]
    assert "a-lane-token" not in " ".join(command) + repr(spec)
    unlocked = triton_command(install, replace(spec, is_locked=False), ports, "x_")
    assert "restricted" not in " ".join(unlocked)


def test_models_are_compiled_before_triton_looks_at_them(tmp_path: Path) -> None:
    """The stub would write the file at its first start, and Triton take it for a new model."""
    source = tmp_path / "llm" / "1" / "model.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    spec = TritonSpec(tmp_path, ("llm", "absent"))
    compile_models(spec)
    (compiled,) = (source.parent / "__pycache__").iterdir()
    assert compiled == Path(importlib.util.cache_from_source(str(source)))
    os.utime(source, ns=(10**18, 10**18))
    later = 10**18 + 10**9
    os.utime(compiled, ns=(later, later))
    compile_models(spec)
    assert compiled.stat().st_mtime_ns == later, "another server may be running on it"
    source.write_text("x = 2\n")
    compile_models(spec)
    assert compiled.stat().st_mtime_ns > later
    source.write_text("this is no Python\n")
    compile_models(spec)  # the stub says so


@pytest.mark.parametrize("name", ["a b", "ü", "$HOME", "a;b", "a'b", "a:b", "a\nb"])
def test_what_a_shell_would_take_apart_gets_a_link_of_the_servers_own_name(
    tmp_path: Path, name: str
) -> None:
    plain = Path("/srv/models-1.5_x/a+b@c=d,e%f")
    assert is_plain(plain) and not is_plain(Path("srv"))
    assert Links("x_", tmp_path).to(plain, "models") == plain
    link = Links("x_", tmp_path).to(Path("/srv") / name, "models")
    assert link == tmp_path / "x_models" and link.readlink() == Path("/srv") / name


def test_the_stubs_python_imports_from_plain_paths(tmp_path: Path) -> None:
    env = {
        "PATH": os.pathsep.join(["/srv/ü/.venv/bin", "/home/jürgen/bin", "/usr/bin"]),
        "VIRTUAL_ENV": "/srv/ü/.venv",
        "PYTHONPATH": os.pathsep.join(["/srv/ü", "/plain", "ö"]),
        "OTHER": "ü",
    }
    linked = Links("x_", tmp_path).environment(env)
    python, code = tmp_path / "x_python", tmp_path / "x_code-0"
    assert linked == {
        "PATH": os.pathsep.join([f"{python}/bin", "/home/jürgen/bin", "/usr/bin"]),
        "VIRTUAL_ENV": str(python),
        "PYTHONPATH": os.pathsep.join([str(code), "/plain", "ö"]),
        "OTHER": "ü",
    }
    assert (python.readlink(), code.readlink()) == (Path("/srv/ü/.venv"), Path("/srv/ü"))
