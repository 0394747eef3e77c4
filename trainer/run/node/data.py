"""A node's data: the store opened with a run's options, its batches, and what the store has got meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from loader import GenesisDataset, LoaderError
from loader.options import StoreOptions
from loader.session import Session
from manifests import SPECIAL_TOKENS, Vocabulary, VocabularyFile, canonical_json, sha256_hex
from trainer.inner import Batch
from trainer.model import rows_for
from trainer.model.loss import IGNORED_LABEL
from trainer.outer.engine.daemon_call import start_daemon
from trainer.run.config import DataConfig, RunConfig

logger = logging.getLogger(__name__)

_LINEAGE_MERGES = 256  # A vocabulary only grows behind its last merge, so the first ones tell which vocabulary it is.
_UNK_ID = SPECIAL_TOKENS.index("<|unk|>")


def open_session(data: DataConfig) -> Session:
    """Opens the store: its manifest, index and vocabulary; raises `LoaderError` where it cannot be read."""
    return Session.open(StoreOptions.of(data.store, **_store_options(data)))


def _store_options(data: DataConfig) -> dict[str, Any]:
    return {
        "mirrors": data.mirrors,
        "public_key": data.public_key or None,
        "cache_dir": data.cache_dir or None,
        "cache_bytes": data.cache_bytes or None,
        "timeout_s": data.timeout_s,
    }


def open_dataset(config: RunConfig) -> GenesisDataset:
    """Opens the stream of a node's batches; raises `LoaderError` where the store cannot be read."""
    data = config.data
    return GenesisDataset(
        data.store,
        config.node_id,
        **_store_options(data),
        seq_len=config.inner.seq_len,
        batch_size=config.inner.micro_batch_size,
        seed=config.seed,
        count=data.shards_per_node,
        assignment=data.assignment,
        sources=data.sources or None,
        holdout=data.holdout,
        plateau=data.plateau,
    )


def endless(dataset: Iterable[Batch]) -> Iterator[Batch]:
    """Yields pass after pass: after a state is loaded, the stream goes on with the next pass from there."""
    while True:
        yield from dataset


def lineage_of(vocabulary: Vocabulary) -> str:
    """Returns the digest of what never changes in a vocabulary as it grows: pattern and first merges.

    One that was made elsewhere does not grow: of that the file, and which id ends a document.
    """
    if not isinstance(vocabulary, VocabularyFile):
        return sha256_hex(canonical_json([vocabulary.tokenizer_sha256, vocabulary.eos_id]))
    return sha256_hex(canonical_json([vocabulary.pattern, vocabulary.pairs()[:_LINEAGE_MERGES]]))


def within_vocabulary(batches: Iterator[Batch], rows: Callable[[], int]) -> Iterator[Batch]:
    """Yields batches in which ids the model has no row for are UNK and not learned; ``rows`` is called for each."""
    is_logged = False
    for batch in batches:
        limit = rows()
        ids, labels = batch["input_ids"], batch["labels"]
        if int(ids.max()) < limit and int(labels.max()) < limit:
            yield batch
            continue
        if not is_logged:
            logger.info("the store has ids beyond the model's %d rows; they are left out until all members grow", limit)
            is_logged = True
        yield {
            **batch,
            "input_ids": torch.where(ids < limit, ids, _UNK_ID),
            "labels": torch.where(labels < limit, labels, IGNORED_LABEL),
        }


class StoreWatch:
    """The newest that is known of a store while a run reads what it had: new shards, a larger vocabulary.

    The store is asked in the background, at most every ``refresh_s``, so that one that does not answer never holds
    training up. `look` is for the training thread, everything else for any.
    """

    def __init__(self, session: Session, refresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._newest: tuple[Session, Vocabulary] = session, session.catalog.vocabulary()
        self._refresh_s = refresh_s
        self._clock = clock
        self._next_s = clock() + refresh_s
        self._request: Future[tuple[Session, Vocabulary]] | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The newest one seen."""
        return self._newest[1]

    @property
    def num_ids(self) -> int:
        """Ids of the newest vocabulary seen."""
        return self.vocabulary.next_merge_id

    def rows(self) -> int:
        """Returns the rows a model needs for the newest vocabulary seen."""
        return rows_for(self.num_ids)

    def look(self) -> bool:
        """Asks the store if it is time to, or takes the answer; returns whether it has changed. Never waits."""
        if self._request is None:
            if self._clock() >= self._next_s:
                self._request = start_daemon(self._ask, "store-watch")
            return False
        if not self._request.done():
            return False
        request, self._request, self._next_s = self._request, None, self._clock() + self._refresh_s
        try:
            found = request.result()
        except LoaderError as error:
            logger.warning("the store cannot be asked for what is new: %s", error)
            return False
        before, self._newest = self._newest, found
        return found[0].catalog.manifest.sequence > before[0].catalog.manifest.sequence

    def _ask(self) -> tuple[Session, Vocabulary]:
        session = self._newest[0]
        catalog = session.newest_catalog()
        return replace(session, catalog=catalog), catalog.vocabulary()
