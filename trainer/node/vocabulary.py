"""The vocabulary of a run as it grows: looked up between outer steps, adopted when all members can.

Until the model has a row for an id, the id is read as UNK, and not learned: a node whose store is ahead of the run goes
on training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from loader import LoaderError
from loader.options import StoreOptions
from loader.session import Session
from manifests import SPECIAL_TOKENS, VocabularyFile
from trainer.config import DataConfig
from trainer.inner.loop import Batch
from trainer.model import rows_for

__all__ = ["VocabularyWatch", "within_vocabulary"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 60.0
_IGNORED_LABEL = -100
_UNK_ID = SPECIAL_TOKENS.index("<|unk|>")


class VocabularyWatch:
    """Knows the newest vocabulary of the store, asked for at most once a minute."""

    def __init__(self, data: DataConfig, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._session = Session.open(
            StoreOptions.of(
                data.store,
                mirrors=data.mirrors,
                public_key=data.public_key or None,
                cache_dir=data.cache_dir or None,
                cache_bytes=data.cache_bytes or None,
                timeout_s=data.timeout_s,
            )
        )
        self._look_every_s = look_every_s
        self._looked_at_s = time.monotonic()
        self._vocabulary = self._session.catalog.vocabulary()

    @property
    def vocabulary(self) -> VocabularyFile:
        """The newest one seen."""
        return self._vocabulary

    def rows(self) -> int:
        """Rows a model needs for the newest vocabulary seen."""
        return rows_for(self._vocabulary.next_merge_id)

    def look(self) -> None:
        """Asks the store, unless that was done a moment ago; what goes wrong is logged and costs nothing."""
        if time.monotonic() < self._looked_at_s + self._look_every_s:
            return
        self._looked_at_s = time.monotonic()
        try:
            vocabulary = self._session.newest_catalog().vocabulary()
        except LoaderError as error:
            logger.warning("the store's newest vocabulary: %s", error)
            return
        if vocabulary.next_merge_id > self._vocabulary.next_merge_id:
            logger.info("the store's vocabulary has %d ids now", vocabulary.next_merge_id)
            self._vocabulary = vocabulary


def within_vocabulary(batches: Iterator[Batch], rows: Callable[[], int]) -> Iterator[Batch]:
    """Hands batches on; ids the model has no row for become UNK, and are not learned."""
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
            "labels": torch.where(labels < limit, labels, _IGNORED_LABEL),
        }
