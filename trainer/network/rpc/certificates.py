"""TLS between nodes that no authority knows: each makes its own certificate at start, and others pin it.

A certificate says nothing by itself (all bear the same name). It is trusted because the node's ed25519 key vouches for
it: by the signed announcement that contains it, or, fetched from an address of which nothing is known, by the first
signed reply that names its digest. As requests name it, too, one that was meant for a node's former life is refused by
its next one: that closes the gap which the replay guard, kept in memory only, would have across a restart.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import socket
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
_REFUSED = os.strerror(errno.ECONNREFUSED).lower()
_ERRNO = re.compile(r"\[Errno ([0-9]+)\]")


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
        PeerUnavailableError: there is no such host, it cannot be reached, or nothing there speaks TLS, or not in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    writer = await _connected(host, port, deadline_s, timeout_s)
    try:
        async with asyncio.timeout_at(deadline_s):
            await writer.start_tls(context)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    except (OSError, TimeoutError, ssl.SSLError) as error:
        reason = str(error) or f"no answer in {timeout_s:g} s"
        raise PeerUnavailableError(f"{host}:{port} shows no TLS certificate ({reason})") from None
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(der).encode()


async def _connected(host: str, port: int, deadline_s: float, timeout_s: float) -> asyncio.StreamWriter:
    """A connection on which nothing has been said yet; ``timeout_s`` is for the message.

    Raises:
        PeerUnavailableError: there is none to be had.
    """
    try:
        async with asyncio.timeout_at(deadline_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise PeerUnavailableError(f"{host}:{port} cannot be reached: no answer in {timeout_s:g} s") from None
    except (OSError, UnicodeError) as error:
        reason = _why_unreachable(error)
        if reason == _REFUSED:
            raise PeerUnavailableError(f"{host}:{port} refuses connections: nothing listens there (any more)") from None
        raise PeerUnavailableError(f"{host}:{port} cannot be reached: {reason}") from None
    return writer


def _why_unreachable(error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return "its name cannot be looked up now"
    if isinstance(error, UnicodeError | socket.gaierror):  # The former: no name at all, such as one of 70 letters.
        return "no such host"
    # Of a host with several addresses asyncio makes one error, which has the others' texts only.
    numbers = {error.errno} if error.errno is not None else {int(number) for number in _ERRNO.findall(str(error))}
    return ", ".join(os.strerror(number).lower() for number in sorted(numbers)) or str(error)
