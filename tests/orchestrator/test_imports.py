"""What the orchestrator imports and reads before it listens, and what only when it is needed."""

import asyncio
import ssl
import subprocess
import sys

import pytest

from orchestrator.certificates import read_later
from tests.support.certificates import Certificates, certificates


@pytest.fixture(scope="module")
def made() -> Certificates:
    return certificates()


def test_starts_without_the_libraries_that_are_seldom_needed() -> None:
    """They would take longer than all else that it does before it listens."""
    probe = """if True:
        import sys
        import orchestrator.certificates
        import orchestrator.__main__

        seldom = {"grpc", "jinja2", "ml_dtypes", "rich", "torch", "transformers"}
        seldom |= {"cryptography", "opentelemetry", "redis", "pool.engines.environments"}
        sys.exit(", ".join(seldom & sys.modules.keys()) or 0)
    """
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


async def test_certificates_are_read_by_the_first_connection(
    made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with read_later():
        later = ssl.create_default_context()
        stranger = ssl.create_default_context()
    assert "set_default_verify_paths" not in vars(ssl.SSLContext)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made.server.certificate, made.server.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", ssl=serving)
    async with server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("SSL_CERT_FILE", str(made.ca.certificate))
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=later)
            assert await reader.read() == b"hello"
            writer.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(made.stranger.certificate))
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", port, ssl=stranger)
