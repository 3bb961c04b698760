"""Ports that are free, and those that are not."""

import socket

import pytest

from orchestrator.provision.errors import PortInUse
from orchestrator.provision.ports import free_ports, is_free, is_loopback, require_free


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        require_free("127.0.0.1", port, "")


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}: .*in use; take another"):
            require_free("127.0.0.1", port, "take another")
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:80"):
        require_free("192.0.2.1", 80, "")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
        ("::", False),
        ("192.168.0.1", False),
        ("localhost.evil.example", False),
    ],
)
def test_only_this_machine_reaches_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
