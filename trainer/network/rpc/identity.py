"""Who a node is: an ed25519 key, and the TLS certificate that the key vouches for.

The public key, as 64 hexadecimal digits, is the node's name everywhere. The key file is PKCS#8 PEM, mode 0600, made
once and never overwritten: two processes that start at the same moment on one path end up with the same key.

No authority knows the nodes, so each makes its own certificate at start, and others pin it. It is trusted because the
node's key vouches for it: by the signed announcement that contains it, or, fetched from an address of which nothing is
known, by the first signed reply that names its digest. Requests name it too, so a node refuses a request that was meant
for its life before a restart: that closes the gap which the replay guard, kept in memory only, would have.
"""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from manifests.errors import SignatureError
from manifests.signing import generate_private_key, load_private_key, private_key_pem
from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import PeerId, is_peer_id

CERTIFICATE_NAME: Final = "node.genesis.invalid"
"""The name in every node's certificate; `.invalid` resolves nowhere (RFC 2606)."""
_CERTIFICATE_LIFETIME = timedelta(days=3650)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key pair."""

    peer_id: PeerId
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def create(cls) -> Identity:
        """Makes a new random one, kept in memory only."""
        return cls.of(generate_private_key())

    @classmethod
    def of(cls, key: Ed25519PrivateKey) -> Identity:
        """Returns the identity whose private key is ``key``."""
        return cls(key.public_key().public_bytes_raw().hex(), key)

    def sign(self, message: bytes) -> bytes:
        """Returns the signature (64 bytes). Callers keep the kinds of message apart by how they begin."""
        return self._key.sign(message)


def load_or_create_identity(path: str | os.PathLike[str]) -> Identity:
    """Reads the key at ``path``, or makes one there; raises TrainerUsageError where that cannot be."""
    file = Path(path).expanduser()
    try:
        if not file.exists():
            _create_key_file(file)
        key = load_private_key(file.read_bytes())
        mode = stat.S_IMODE(file.stat().st_mode)
    except SignatureError as error:
        raise TrainerUsageError(f"identity file {file}: {error}; move it away to have a new identity made") from None
    except OSError as error:
        raise TrainerUsageError(f"identity file {file}: cannot be used ({error}); name a writable path") from error
    if mode & 0o077:
        logger.warning("identity file %s has mode %o: other users may read this node's key; chmod 600 it", file, mode)
    return Identity.of(key)


def verify_signature(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Returns whether ``peer_id`` made ``signature`` over ``message``; False for anything malformed."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=1024)  # Reading a key costs a sixth of a verification.
def _public_key(peer_id: PeerId) -> Ed25519PublicKey | None:
    # The one spelling of it only: bytes.fromhex would let one key go under several names.
    if not is_peer_id(peer_id):
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer_id))
    except ValueError:
        return None


def _create_key_file(file: Path) -> None:
    """Writes beside ``file`` and links into place, so that the second process finds the key of the first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(private_key_pem(generate_private_key()))
            out.flush()
            os.fsync(out.fileno())
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink()


def make_certificate() -> tuple[bytes, bytes]:
    """Returns a new P-256 certificate signed by itself, and its private key, both PEM (2 ms)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Long before and after now: the clock check tells nodes with wrong clocks by how much they are wrong.
        .not_valid_before(now - _CERTIFICATE_LIFETIME)
        .not_valid_after(now + _CERTIFICATE_LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), key_pem


def certificate_digest(certificate_pem: bytes) -> str:
    """Returns the SHA-256 of the certificate's DER form, hexadecimal; ValueError where it is no PEM."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem.decode("ascii"))).hexdigest()
