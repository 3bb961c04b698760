"""Paths that Triton could not take are given to it as links."""

import os
from pathlib import Path

import pytest

from pool.engines.safe_paths import Links, is_plain


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/srv/models-1.5_x/a+b@c=d,e%f", True),
        ("/srv/a b", False),
        ("/srv/ü", False),
        ("/srv/$HOME", False),
        ("/srv/a;b", False),
        ("/srv/a'b", False),
        ("/srv/a:b", False),
        ("/srv/a\nb", False),
        ("srv", False),
    ],
)
def test_what_a_shell_and_a_list_of_directories_take_as_it_is(path: str, plain: bool) -> None:
    assert is_plain(Path(path)) is plain


def test_a_plain_path_stays_what_it_is(tmp_path: Path) -> None:
    assert Links("x_", tmp_path).to(Path("/srv/models"), "models") == Path("/srv/models")
    assert not list(tmp_path.iterdir())


def test_another_gets_a_link_of_the_servers_own_name(tmp_path: Path) -> None:
    link = Links("x_", tmp_path).to(Path("/srv/a b"), "models")
    assert link == tmp_path / "x_models"
    assert link.readlink() == Path("/srv/a b")


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
