"""A signature vouches for every field of the manifest, and for nothing else."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import (
    ContractError,
    Manifest,
    SignatureError,
    canonical_json,
    generate_private_key,
    key_id,
    load_private_key,
    load_public_key,
    private_key_pem,
    public_key_pem,
    sign_manifest,
    verify_manifest,
)
from tests.support.contract_strategies import manifests

KEY = generate_private_key()
OTHER = generate_private_key()
MANIFEST = Manifest(
    total_shards=0,
    total_tokens=0,
    total_size_bytes=0,
    sources={},
    created_at="2026-11-20T17:32:03Z",
    updated_at="2026-11-20T17:32:03Z",
)


@pytest.mark.slow
@settings(deadline=None)
@given(manifests())
def test_what_was_signed_is_verified(manifest):
    signed = sign_manifest(manifest, KEY)
    found = verify_manifest(signed.to_json(), KEY.public_key())
    assert found == signed
    assert found.model_copy(update={"signature": None}) == manifest


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_changed_byte_is_verified(data):
    signed = sign_manifest(MANIFEST, KEY)
    body = bytearray(signed.to_json())
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    try:
        found = verify_manifest(bytes(body), KEY.public_key())
    except ContractError:
        return
    assert found == signed


def test_fields_that_this_release_does_not_know_are_vouched_for_too():
    unsigned = {**MANIFEST.to_object(), "later": [1]}
    extended = {**unsigned, "signature": sign_object(unsigned)}
    assert verify_manifest(canonical_json(extended), KEY.public_key())
    with pytest.raises(SignatureError, match="changed after it was signed"):
        verify_manifest(canonical_json({**extended, "later": [2]}), KEY.public_key())


def sign_object(value: dict[str, object]) -> dict[str, str]:
    signature = base64.b64encode(KEY.sign(canonical_json(value))).decode()
    return {"algorithm": "ed25519", "key_id": key_id(KEY.public_key()), "value": signature}


def test_white_space_signing_again_and_keys_as_pem():
    value = json.loads(sign_manifest(MANIFEST, KEY).to_json())
    assert verify_manifest(json.dumps(value, indent=4).encode(), KEY.public_key()).signature
    again = sign_manifest(sign_manifest(MANIFEST, KEY), OTHER)
    assert verify_manifest(again.to_json(), OTHER.public_key())
    assert key_id(load_private_key(private_key_pem(KEY)).public_key()) == key_id(KEY.public_key())
    assert key_id(load_public_key(public_key_pem(KEY.public_key()))) == key_id(KEY.public_key())
    assert len(key_id(KEY.public_key())) == 16


def test_an_unsigned_manifest_and_another_key_are_refused():
    with pytest.raises(SignatureError, match="not signed"):
        verify_manifest(MANIFEST.to_json(), KEY.public_key())
    with pytest.raises(SignatureError, match=key_id(OTHER.public_key())):
        verify_manifest(sign_manifest(MANIFEST, KEY).to_json(), OTHER.public_key())
    signed = sign_manifest(MANIFEST, OTHER)
    assert signed.signature is not None
    forged = signed.signature.model_copy(update={"key_id": key_id(KEY.public_key())})
    with pytest.raises(SignatureError, match="changed"):
        verify_manifest(signed.model_copy(update={"signature": forged}).to_json(), KEY.public_key())


@pytest.mark.parametrize("value", ["", "!", "AAAA", "é", "A" * 88])
def test_a_signature_that_is_none_is_refused(value):
    signed = sign_manifest(MANIFEST, KEY)
    assert signed.signature is not None
    broken = signed.signature.model_copy(update={"value": value})
    with pytest.raises(SignatureError):
        verify_manifest(signed.model_copy(update={"signature": broken}).to_json(), KEY.public_key())


def pem_of_private(key: object, encryption: object = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


X25519 = x25519.X25519PrivateKey.generate()
NO_PRIVATE_KEYS = {
    "empty": b"",
    "text": b"not a key",
    "public": public_key_pem(KEY.public_key()),
    "cut": private_key_pem(KEY)[:60],
    "x25519": pem_of_private(X25519),
    "ec": pem_of_private(ec.generate_private_key(ec.SECP256R1())),
    "rsa": pem_of_private(rsa.generate_private_key(65537, 2048)),
    "encrypted": pem_of_private(KEY, BestAvailableEncryption(b"secret")),
}


@pytest.mark.parametrize("kind", NO_PRIVATE_KEYS)
def test_what_is_no_key(kind):
    with pytest.raises(SignatureError, match="expected an Ed25519 private key"):
        load_private_key(NO_PRIVATE_KEYS[kind])
    other = X25519.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for pem in (b"", private_key_pem(KEY), other):
        with pytest.raises(SignatureError, match="expected an Ed25519 public key"):
            load_public_key(pem)
