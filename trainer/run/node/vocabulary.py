"""Ids of a vocabulary that grows while a run goes on.

Until the model has a row for an id, the id is read as UNK, and not learned: a node whose store is ahead of the run goes
on training. The check costs some 10 µs a batch of 4,096 ids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from manifests import SPECIAL_TOKENS, VocabularyFile, canonical_json, sha256_hex
from trainer.inner import Batch
from trainer.model.loss import IGNORED_LABEL

__all__ = ["lineage_of", "within_vocabulary"]

logger = logging.getLogger(__name__)

_UNK_ID = SPECIAL_TOKENS.index("<|unk|>")
_LINEAGE_MERGES = 256
"""A vocabulary only grows behind its last merge, so the first of them say which vocabulary it is."""


def lineage_of(vocabulary: VocabularyFile) -> str:
    """Digest of what never changes in a vocabulary as it grows: pattern and first merges."""
    return sha256_hex(canonical_json([vocabulary.pattern, vocabulary.pairs()[:_LINEAGE_MERGES]]))


def within_vocabulary(batches: Iterator[Batch], rows: Callable[[], int]) -> Iterator[Batch]:
    """Hands batches on; ids the model has no row for become UNK, and are not learned.

    Args:
        batches: ``input_ids`` and ``labels``.
        rows: rows of the model, asked for each batch.
    """
    told = False
    for batch in batches:
        limit = rows()
        ids, labels = batch["input_ids"], batch["labels"]
        if int(ids.max()) < limit and int(labels.max()) < limit:
            yield batch
            continue
        if not told:
            logger.info("the store has ids beyond the model's %d rows; they are left out until all members grow", limit)
            told = True
        yield {
            **batch,
            "input_ids": torch.where(ids < limit, ids, _UNK_ID),
            "labels": torch.where(labels < limit, labels, IGNORED_LABEL),
        }
