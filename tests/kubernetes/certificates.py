"""The certificates of one fake cluster, valid for one day: its authority, its server and an administrator."""

from __future__ import annotations

import base64
import datetime as dt
import functools
import ipaddress
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


class Certificates:
    """Certificates for a server on 127.0.0.1. All clusters of a process share them."""

    def __init__(self) -> None:
        authority, self._server, admin = _pairs()
        self.authority = _base64(_pem(authority[0]))
        self.admin = {
            "client-certificate-data": _base64(_pem(admin[0])),
            "client-key-data": _base64(_key_pem(admin[1])),
        }

    def context(self) -> ssl.SSLContext:
        """Return the server's TLS context, with optional client certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(_pem(self._server[0]) + _key_pem(self._server[1]))
            file.flush()
            context.load_cert_chain(file.name)
        context.load_verify_locations(cadata=base64.b64decode(self.authority).decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


@functools.lru_cache(maxsize=1)
def _pairs() -> tuple[Pair, Pair, Pair]:
    authority = _issue("kubernetes", None)
    server = _issue("kube-apiserver", authority, ExtendedKeyUsageOID.SERVER_AUTH)
    return authority, server, _issue("kubernetes-admin", authority, ExtendedKeyUsageOID.CLIENT_AUTH)


def _issue(name: str, issuer: Pair | None, *usages: x509.ObjectIdentifier) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer = issuer[1] if issuer is not None else key
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer is not None else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is not None:
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        built = built.add_extension(address, critical=False)
        built = built.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return built.sign(signer, hashes.SHA256()), key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
