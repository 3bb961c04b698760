"""Ports that are free, and those that are not."""

import resource
import socket

import pytest

from catalog.errors import PortInUse, StartFailed
from catalog.hosts import connect_host, is_loopback
from pool.process import ports
from pool.process.ports import choose_ports, free_ports, host_port, is_free, require_free
from pool.units.triton import require_files
from tests.support.cases import for_each


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}: .*in use; take another"):
            require_free("127.0.0.1", port, "take another")
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_the_kernel_chooses_where_all_ports_are_for_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "_first_outgoing_port", lambda: 1024)
    assert all(choose_ports("127.0.0.1", [0, 0], "take another"))


@for_each("host", ["nope.invalid", "a..b", "192.0.2.1"])
def test_no_port_is_free_on_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(PortInUse, match="give an address"):
        free_ports(3, host)


def test_how_hosts_are_spelled_and_which_are_ours() -> None:
    assert host_port("::1", 8080) == "[::1]:8080"
    assert host_port("127.0.0.1", 8080) == "127.0.0.1:8080"
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1", "::1": "::1", "a.b": "a.b"}
    assert {host: connect_host(host) for host in reached} == reached
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    others = ("0.0.0.0", "", "::", "192.168.0.1", "localhost.evil.example")
    assert not any(map(is_loopback, others))
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:80"):
        require_free("192.0.2.1", 80, "")


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_a_triton_gets_the_open_files_that_it_needs(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: told.append(to))
    require_files("triton")
    assert told == [(256, hard)]


def test_too_few_open_files_for_a_triton_is_said_with_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for ever, and log nothing."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(StartFailed, match=r"the limit is 64: raise it with ulimit -n 256 "):
        require_files("triton")
