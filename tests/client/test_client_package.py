"""The package's face: every name is there, and the command does not pay for them."""

import subprocess
import sys

import pytest

import client


def test_every_exported_name_is_there() -> None:
    assert all(isinstance(getattr(client, name), object) for name in client.__all__)
    assert client.TidegateError.__module__ == "client.errors"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = client.Nonsense


def test_the_command_starts_without_the_http_library() -> None:
    """Ctrl-C in the first moments must find ``main`` running, not an import."""
    probe = "import sys, client.cli; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
