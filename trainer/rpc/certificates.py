"""TLS between nodes that no authority knows: each makes its own certificate at start, and others pin it.

A certificate says nothing by itself (all bear the same name). It is trusted because the node's ed25519 key vouches for
it: by the signed announcement that contains it, or, fetched from an address of which nothing is known, by the first
signed reply that names its digest. As requests name it, too, one that was meant for a node's former life is refused by
its next one: that closes the gap which the replay guard, kept in memory only, would have across a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from trainer.errors import PeerUnavailableError

__all__ = ["CERTIFICATE_NAME", "NodeCertificate", "certificate_digest", "fetch_certificate", "make_certificate"]

CERTIFICATE_NAME: Final = "node.genesis.invalid"
"""The name in every node's certificate; `.invalid` resolves nowhere (RFC 2606)."""

_LIFETIME = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """A certificate and its key, both PEM."""

    certificate_pem: bytes
    key_pem: bytes


def make_certificate() -> NodeCertificate:
    """A new P-256 key, certified by itself (2 ms)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Long before and after now: nodes with wrong clocks are told so by the clock check, which says by how much.
        .not_valid_before(now - _LIFETIME)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    return NodeCertificate(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def certificate_digest(certificate_pem: bytes) -> str:
    """SHA-256 of the certificate's DER form, hexadecimal.

    Raises:
        ValueError: it is not a certificate in PEM.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem.decode("ascii"))).hexdigest()


async def fetch_certificate(host: str, port: int, timeout_s: float) -> bytes:
    """The certificate (PEM) that is shown at an address: no more than a claim until a signed reply confirms it.

    Raises:
        PeerUnavailableError: nothing there speaks TLS, or not in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ConnectionRefusedError:
        raise PeerUnavailableError(f"{host}:{port} refuses connections: nothing listens there (any more)") from None
    except (OSError, TimeoutError, ssl.SSLError) as error:
        reason = str(error) or f"no answer in {timeout_s:g} s"
        raise PeerUnavailableError(f"{host}:{port} shows no TLS certificate ({reason})") from None
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(der).encode()
