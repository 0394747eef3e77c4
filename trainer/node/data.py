"""The node's batches, and the vocabulary they are in."""

from __future__ import annotations

from loader import GenesisDataset
from manifests import VocabularyFile, canonical_json, sha256_hex
from trainer.config import DataConfig, RunConfig

__all__ = ["lineage_of", "open_dataset"]

_LINEAGE_MERGES = 256
"""A vocabulary only grows behind its last merge, so the first of them say which vocabulary it is."""


def open_dataset(config: RunConfig, batch_size: int) -> GenesisDataset:
    """The stream of this node's batches.

    Raises:
        LoaderError: the store cannot be read.
    """
    data: DataConfig = config.data
    return GenesisDataset(
        data.store,
        config.node_id,
        seq_len=config.inner.seq_len,
        batch_size=batch_size,
        seed=config.seed,
        mirrors=data.mirrors,
        public_key=data.public_key or None,
        cache_dir=data.cache_dir or None,
        cache_bytes=data.cache_bytes or None,
        timeout_s=data.timeout_s,
        count=data.shards_per_node,
        assignment=data.assignment,
        sources=data.sources or None,
        holdout=data.holdout,
        plateau=data.plateau,
    )


def lineage_of(vocabulary: VocabularyFile) -> str:
    """Digest of what never changes in a vocabulary as it grows: pattern, special ids and first merges."""
    return sha256_hex(canonical_json([vocabulary.pattern, vocabulary.pairs()[:_LINEAGE_MERGES]]))
