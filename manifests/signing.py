"""Ed25519 signatures over manifests.

The signature is checked on the JSON that came, not on the parsed model, so fields this release does not know are
vouched for too. Keys are PEM (PKCS#8 private, SubjectPublicKeyInfo public), readable by openssl.
"""

from __future__ import annotations

import base64

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from manifests.errors import SignatureError
from manifests.manifest import Manifest, Signature
from manifests.serialisation import canonical_json, parse_object, sha256_hex


def generate_private_key() -> Ed25519PrivateKey:
    """A new random key."""
    return Ed25519PrivateKey.generate()


def private_key_pem(key: Ed25519PrivateKey) -> bytes:
    """PKCS#8 PEM, unencrypted: keep the file to yourself (mode 0600)."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_key_pem(key: Ed25519PublicKey) -> bytes:
    """SubjectPublicKeyInfo PEM, to hand out."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def load_private_key(pem: bytes) -> Ed25519PrivateKey:
    """Reads `private_key_pem`'s form.

    Raises:
        SignatureError: it is not an unencrypted Ed25519 private key.
    """
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SignatureError(
            f"expected an Ed25519 private key in PEM ({error}); make one with 'genesis keygen'"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError("expected an Ed25519 private key, found another kind; make one with 'genesis keygen'")
    return key


def load_public_key(pem: bytes) -> Ed25519PublicKey:
    """Reads `public_key_pem`'s form.

    Raises:
        SignatureError: it is not an Ed25519 public key.
    """
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(
            f"expected an Ed25519 public key in PEM ({error}); use the .pub file of 'genesis keygen'"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise SignatureError("expected an Ed25519 public key, found another kind")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """Short name of a public key: 16 hexadecimal digits of its sha256."""
    return sha256_hex(key.public_bytes(Encoding.Raw, PublicFormat.Raw))[:16]


def sign_manifest(manifest: Manifest, key: Ed25519PrivateKey) -> Manifest:
    """``manifest`` with its signature field set."""
    unsigned = manifest.model_copy(update={"signature": None})
    value = base64.b64encode(key.sign(unsigned.to_json())).decode()
    signature = Signature(algorithm="ed25519", key_id=key_id(key.public_key()), value=value)
    return manifest.model_copy(update={"signature": signature})


def verify_manifest(data: bytes, key: Ed25519PublicKey) -> Manifest:
    """Parses a manifest file and checks that ``key`` signed exactly this content.

    Raises:
        SignatureError: it is unsigned, signed by another key, or changed since.
        ContractError: it is not a manifest at all.
    """
    value = parse_object(data, Manifest.FILE)
    manifest = Manifest.from_object(value)
    if manifest.signature is None:
        raise SignatureError(f"manifest.json is not signed; expected a signature by key {key_id(key)}")
    if manifest.signature.key_id != key_id(key):
        raise SignatureError(
            f"manifest.json is signed by key {manifest.signature.key_id}, expected {key_id(key)}; "
            "check that --public-key is this store's"
        )
    value.pop("signature")
    try:
        key.verify(base64.b64decode(manifest.signature.value, validate=True), canonical_json(value))
    except (InvalidSignature, ValueError):
        raise SignatureError(
            f"manifest.json was changed after it was signed (sequence {manifest.sequence}); do not use this store"
        ) from None
    return manifest
