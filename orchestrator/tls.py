"""Secures connections to Triton with TLS, mutual if Tidegate has a certificate (OR-25).

All gRPC clients of Triton use these settings: lanes, clips, swaps, and the launcher's checks.
"""

import asyncio
import json
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import grpc

SETTING = "TIDEGATE_LANES__TLS"
_OTHER_NAME = f"its certificate is for another name: see server_name of {SETTING}"
_UNTRUSTED = f"its certificate is not trusted: ca of {SETTING} names its signer"
_NO_TLS = f"it speaks no TLS: unset {SETTING}, or start Triton with --grpc-use-ssl"
_ENDED = (
    f"it ended the TLS handshake: perhaps it needs a certificate, or refuses ours; see {SETTING}"
)
_NAMES = ("Hostname mismatch", "IP address mismatch")
_TOO_OLD = ssl.TLSVersion.TLSv1_2
_BY_HASH = re.compile(r"[0-9a-f]{8}\.\d+", re.ASCII)
"""Names of certificate files that OpenSSL reads in a folder."""


class Tls(BaseModel):
    """Files are PEM. They are read for each connection, so renewed certificates take effect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = None
    """Certificates of the signers of the other side's; by default those that the system trusts."""
    certificate: Path | None = None
    """The certificate shown to the other side, with the chain from it to its root."""
    key: Path | None = None
    """The private key of ``certificate``, not encrypted."""
    server_name: str = Field(default="", pattern=r"^[A-Za-z0-9._:-]*$")
    """The name in Triton's certificate, if it is not its address."""

    @model_validator(mode="after")
    def _check(self) -> "Tls":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: give both, or none of them")
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """An SSL context for a connection to Triton. Raises ``ValueError`` for unusable files."""
        try:
            made = ssl.create_default_context(cafile=self.ca)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"ca: cannot use {self.ca}: {_said(error)}") from None
        made.minimum_version = _TOO_OLD
        made.set_alpn_protocols(["h2"])
        if self.certificate is not None and self.key is not None:
            for name, path in (("certificate", self.certificate), ("key", self.key)):
                _read(name, path)
            try:
                # Without a password callback OpenSSL would ask at the terminal.
                made.load_cert_chain(self.certificate, self.key, password=lambda: b"")
            except OSError as error:
                raise ValueError(
                    f"certificate: cannot use {self.certificate} with the key {self.key}: "
                    f"{_said(error)}"
                ) from None
        return made

    def check_served(self, host: str) -> None:
        """Check that a client with these settings can reach a Triton that shows ``certificate`` as
        ``host``. Raises ``ValueError``."""
        if self.certificate is None or self.key is None:
            raise ValueError("a Triton that is started here needs a certificate and a key")
        client = self.context()  # reads all files
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(self.certificate, self.key)
        if self.ca is not None:
            server.load_verify_locations(self.ca)
            server.verify_mode = ssl.CERT_REQUIRED
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        asks = client.wrap_bio(to_client, to_server, server_hostname=self.server_name or host)
        answers = server.wrap_bio(to_server, to_client, server_side=True)
        try:
            _shake_hands(asks, answers)
        except ssl.SSLError as error:
            raise ValueError(why_no_tls(error)) from None

    def credentials(self) -> "grpc.ChannelCredentials":
        """Credentials with these settings for gRPC's own client. Raises ``ValueError``."""
        import grpc

        files = ("ca", self.ca), ("key", self.key), ("certificate", self.certificate)
        ca, key, certificate = (path and _read(name, path) for name, path in files)
        return grpc.ssl_channel_credentials(ca or _trusted_by_system(), key, certificate)


def stated_tls(text: str) -> object:
    """The JSON of a variable for ``Tls``; None for an empty text. Raises ``ValueError``."""
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise ValueError(f'expected JSON such as {{"ca": "/path/ca.pem"}}: {error}') from None


def spell_tls(tls: Tls | None) -> str:
    """The text that ``stated_tls`` reads."""
    return "" if tls is None else tls.model_dump_json(exclude_defaults=True)


async def open_channel(
    address: str, tls: Tls | None, options: Sequence[tuple[str, str | int]]
) -> "grpc.aio.Channel":
    """A channel of gRPC's own client to ``host:port``. Raises ``ValueError``."""
    import grpc

    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = await asyncio.to_thread(tls.credentials)
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(address, credentials, options=[*options, *named])


def why_no_tls(error: Exception) -> str:
    """A TLS connection's error, and its setting."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message or str(error)
        if said.startswith(_NAMES):
            return f"{_OTHER_NAME} ({said})"
        return f"{_UNTRUSTED} ({said})"
    if isinstance(error, ssl.SSLError):
        reason = _said(error)
        return f"{_ENDED if 'alert' in reason else _NO_TLS} ({reason})"
    return _ENDED


def _trusted_by_system() -> bytes | None:
    """The certificates that ``context`` trusts without ``ca``; gRPC alone would use its own list.
    None if the system has none."""
    paths = ssl.get_default_verify_paths()
    files = [Path(paths.cafile)] if paths.cafile else []
    if paths.capath:
        files += sorted(p for p in Path(paths.capath).iterdir() if _BY_HASH.fullmatch(p.name))
    return b"\n".join(_read("ca", path) for path in files if path.is_file()) or None


def _shake_hands(*ends: ssl.SSLObject) -> None:
    """Run the TLS handshake of both ends alternately. Raises ``ssl.SSLError``."""
    waiting = list(ends)
    while waiting:
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            if end in waiting:
                waiting.remove(end)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: cannot read {path}: {error.strerror}") from None


def _said(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error)
