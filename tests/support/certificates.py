"""Certificates for servers and clients on this machine, made again for a test run."""

import atexit
import datetime
import ipaddress
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SERVER_NAME = "triton.example"
_VALID = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files and for those who sign with them."""

    certificate: Path
    key: Path
    pem: bytes
    key_pem: bytes
    _made: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    def locked_key(self) -> bytes:
        """The key as it is kept with a password."""
        locked = serialization.BestAvailableEncryption(b"secret")
        pkcs8 = serialization.PrivateFormat.PKCS8
        return self._key.private_bytes(serialization.Encoding.PEM, pkcs8, locked)

    def sign(self, folder: Path, name: str, *names: x509.GeneralName) -> "Pair":
        """A certificate for ``names``, under this one."""
        return _make(folder, name, names, self)


@dataclass(frozen=True)
class Certificates:
    """``server`` is for 127.0.0.1 and localhost, ``named`` for ``SERVER_NAME`` only; ``stranger``
    is signed by itself."""

    ca: Pair
    server: Pair
    named: Pair
    client: Pair
    stranger: Pair

    def credentials(
        self, pair: Pair | None = None, *, mutual: bool = False
    ) -> grpc.ServerCredentials:
        """What a server of gRPC's own shows, and whether it asks for as much."""
        shown = pair or self.server
        return grpc.ssl_server_credentials(
            [(shown.key_pem, shown.pem)],
            self.ca.pem if mutual else None,
            require_client_auth=mutual,
        )


@cache
def certificates() -> Certificates:
    """The same for all tests of a process."""
    folder = Path(mkdtemp(prefix="tidegate-certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ca = _make(folder, "ca", (), None)
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    return Certificates(
        ca,
        ca.sign(folder, "server", loopback, x509.DNSName("localhost")),
        ca.sign(folder, "named", x509.DNSName(SERVER_NAME)),
        ca.sign(folder, "client", x509.DNSName("orchestrator")),
        _make(folder, "stranger", (loopback,), None),
    )


def listen(server: grpc.aio.Server, address: str, tls: grpc.ServerCredentials | None) -> int:
    """Have a server listen, over TLS where there are credentials; its port."""
    if tls is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, tls))


def _make(
    folder: Path, name: str, names: tuple[x509.GeneralName, ...], signer: Pair | None
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tidegate test {name}")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer._made.subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = builder.sign(signer._key if signer else key, hashes.SHA256())
    plain = serialization.NoEncryption()
    pem = made.public_bytes(serialization.Encoding.PEM)
    pkcs8 = serialization.PrivateFormat.PKCS8
    key_pem = key.private_bytes(serialization.Encoding.PEM, pkcs8, plain)
    certificate, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(pem)
    key_file.write_bytes(key_pem)
    return Pair(certificate, key_file, pem, key_pem, made, key)
