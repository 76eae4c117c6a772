"""A certificate for fake servers and their administrators, valid for one day. It signs itself."""

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
from cryptography.x509.oid import NameOID


class Certificates:
    """A certificate for servers on 127.0.0.1, which is its own authority. All clusters of a process share it."""

    def __init__(self) -> None:
        self._certificate, self._key = _issue()
        self.authority = base64.b64encode(self._certificate).decode()
        self.admin = {
            "client-certificate-data": self.authority,
            "client-key-data": base64.b64encode(self._key).decode(),
        }

    def context(self) -> ssl.SSLContext:
        """Return the server's TLS context, with optional client certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(self._certificate + self._key)
            file.flush()
            context.load_cert_chain(file.name)
        context.load_verify_locations(cadata=self._certificate.decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


@functools.cache
def _issue() -> tuple[bytes, bytes]:
    """Return the certificate and its key (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now, hour = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
    serial = x509.random_serial_number()
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), serial, now - hour, now + 24 * hour)
    extensions = (
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False),
    )
    for extension, critical in extensions:
        unsigned = unsigned.add_extension(extension, critical=critical)
    pem = serialization.Encoding.PEM
    key_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return unsigned.sign(key, hashes.SHA256()).public_bytes(pem), key_pem
