"""The head of the chain: the manifest with its signature, and the checkpoint that must agree with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from genesis.errors import StoreError
from genesis.snapshot import PublishedManifest, read_checkpoints_if_there, require_manifest
from genesis.store import ReadableStore
from genesis.verification.report import Findings
from genesis.verification.shards import EOS
from manifests import (
    BYTE_OFFSET,
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    Checkpoints,
    ContractError,
    Manifest,
    SignatureError,
    SourceCheckpoint,
    verify_manifest,
)

SignatureState = Literal["verified", "invalid", "not checked", "unsigned"]


@dataclass(frozen=True, slots=True)
class CheckedManifest:
    """The manifest, as far as it can be used; None if it is none."""

    manifest: Manifest | None
    signature: SignatureState = "unsigned"
    key_id: str | None = None


def check_manifest(store: ReadableStore, public_key: Ed25519PublicKey | None, findings: Findings) -> CheckedManifest:
    """Reads the manifest and checks its form, its sums and its signature.

    A wrong signature is a problem, but the store is still held against the manifest: that tells what was changed.

    Raises:
        StoreEmptyError: there is none.
        StoreError: the store cannot be read.
    """
    try:
        published = require_manifest(store)
    except ContractError as error:
        findings.problem(MANIFEST_KEY, error)
        return CheckedManifest(None)
    manifest = published.manifest
    if manifest.total_shards and not manifest.index:
        findings.problem(MANIFEST_KEY, "expected an index, found none: nothing vouches for the shards, none is checked")
    if manifest.total_shards and manifest.tokenizer is None:
        findings.problem(MANIFEST_KEY, "expected the vocabulary its shards were written with, found none")
    state = _signature_state(published, public_key, findings)
    return CheckedManifest(manifest, state, manifest.signature.key_id if manifest.signature else None)


def _signature_state(
    published: PublishedManifest, public_key: Ed25519PublicKey | None, findings: Findings
) -> SignatureState:
    signature = published.manifest.signature
    if public_key is None:
        return "unsigned" if signature is None else "not checked"
    try:
        verify_manifest(published.body, public_key)
    except SignatureError as error:
        findings.problem(MANIFEST_KEY, error)
        return "invalid" if signature else "unsigned"
    return "verified"


def check_checkpoints(store: ReadableStore, manifest: Manifest, findings: Findings) -> Checkpoints | None:
    """Holds checkpoints.json, where it can be read, against the manifest; returned if both are of one commit."""
    try:
        checkpoints = read_checkpoints_if_there(store)
    except ContractError as error:
        findings.problem(CHECKPOINTS_KEY, error)
        return None
    except StoreError as error:
        findings.note(f"checkpoints.json cannot be read and is not checked ({error})")
        return None
    if checkpoints is None or checkpoints.manifest is None:
        findings.note("there is no checkpoint to go on from: the store can be read, but not added to")
        return None
    committed = checkpoints.manifest
    if committed.sequence > manifest.sequence:
        findings.note(
            f"checkpoints.json stands at commit {committed.sequence}, manifest.json at {manifest.sequence}: a "
            "populator is at work, or was stopped before it published (it will at its next start)"
        )
        return None
    if committed.sequence < manifest.sequence:
        findings.problem(
            CHECKPOINTS_KEY,
            f"expected commit {manifest.sequence} as in manifest.json, found {committed.sequence}; "
            "restore the newest copy",
        )
        return None
    if committed != manifest.model_copy(update={"signature": None}):
        findings.problem(CHECKPOINTS_KEY, "expected the manifest it stands for to be manifest.json, found another")
    for name, source in checkpoints.sources.items():
        for what in _source_problems(name, source, manifest):
            findings.problem(CHECKPOINTS_KEY, f"{name}: {what}")
    return checkpoints


def _source_problems(name: str, source: SourceCheckpoint, manifest: Manifest) -> list[str]:
    problems = []
    totals = manifest.sources.get(name)
    last_shard_id = totals.last_shard_id if totals else -1
    if source.last_shard_id != last_shard_id:
        problems.append(f"expected last_shard_id {last_shard_id} as in the manifest, found {source.last_shard_id}")
    documents = totals.documents_processed if totals else 0
    if source.documents_processed != documents:
        problems.append(
            f"expected documents_processed {documents} as in the manifest, found {source.documents_processed}"
        )
    leftover = source.leftover_tokens
    if leftover and manifest.tokenizer and max(leftover) >= manifest.tokenizer.next_merge_id:
        problems.append(f"expected leftover_tokens below {manifest.tokenizer.next_merge_id}, found {max(leftover)}")
    specials = [token for token in leftover if token < BYTE_OFFSET]
    if leftover and (specials != [EOS] or leftover[-1] != EOS):
        problems.append("expected leftover_tokens to end with their only EOS and to hold no other special id")
    return problems


def goes_on_after(checkpoints: Checkpoints | None) -> Mapping[int, bool]:
    """By the id of each source's last shard: whether its last document goes on behind it."""
    if checkpoints is None:
        return {}
    return {source.last_shard_id: bool(source.leftover_tokens) for source in checkpoints.sources.values()}
