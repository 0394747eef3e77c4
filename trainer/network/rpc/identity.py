"""Who a node is: an ed25519 key; its public half, as 64 hexadecimal digits, is the node's name everywhere.

The key file is PKCS#8 PEM, mode 0600, made once and never overwritten: two processes that start at the same moment
on one path end up with the same key. A public key once read is kept (1,024 of them): reading costs as much as a
sixth of a verification.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from manifests.errors import SignatureError
from manifests.signing import generate_private_key, load_private_key, private_key_pem
from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import PeerId

__all__ = ["Identity", "load_or_create_identity", "verify_signature"]

_PEER_ID = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key pair."""

    peer_id: PeerId
    """The public key: 64 lower-case hexadecimal digits."""
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def create(cls) -> Identity:
        """A new random one, kept in memory only."""
        return cls.of(generate_private_key())

    @classmethod
    def of(cls, key: Ed25519PrivateKey) -> Identity:
        """The identity whose private key is ``key``."""
        return cls(key.public_key().public_bytes_raw().hex(), key)

    def sign(self, message: bytes) -> bytes:
        """The signature (64 bytes) over ``message``. Callers keep the kinds of message apart by how they begin."""
        return self._key.sign(message)


def load_or_create_identity(path: str | os.PathLike[str]) -> Identity:
    """Reads the key at ``path``, or makes one there.

    Args:
        path: a file; ``~`` is expanded and its folder made.

    Raises:
        TrainerUsageError: the file holds something else, or cannot be read or written.
    """
    file = Path(path).expanduser()
    try:
        if not file.exists():
            _create_key_file(file)
        key = load_private_key(file.read_bytes())
        _warn_if_others_may_read(file)
    except SignatureError as error:
        raise TrainerUsageError(f"identity file {file}: {error}; move it away to have a new identity made") from None
    except OSError as error:
        raise TrainerUsageError(f"identity file {file}: cannot be used ({error}); name a writable path") from error
    return Identity.of(key)


def verify_signature(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` over ``message`` was made by ``peer_id``; False for anything malformed."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=1024)
def _public_key(peer_id: PeerId) -> Ed25519PublicKey | None:
    # The one spelling of it only: bytes.fromhex would let one key go under several names.
    if not _PEER_ID.fullmatch(peer_id):
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer_id))
    except ValueError:
        return None


def _create_key_file(file: Path) -> None:
    """Writes beside ``file`` and links into place: whoever comes second finds the first one's key."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(private_key_pem(generate_private_key()))
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, file)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _warn_if_others_may_read(file: Path) -> None:
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        logger.warning("identity file %s has mode %o: other users may read this node's key; chmod 600 it", file, mode)
