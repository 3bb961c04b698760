"""Paths that Triton could not take are given to it as links."""

import os
from pathlib import Path

import pytest

from pool.engines.safe_paths import Links, is_plain


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
