"""The loader's doors, opened with a run's options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loader import GenesisDataset
from loader.options import StoreOptions
from loader.session import Session
from trainer.inner import Batch
from trainer.run.config import DataConfig, RunConfig

__all__ = ["endless", "open_dataset", "open_session"]


def open_session(data: DataConfig) -> Session:
    """The store: its manifest, index and vocabulary.

    Raises:
        LoaderError: it cannot be reached, or not be believed.
    """
    return Session.open(
        StoreOptions.of(
            data.store,
            mirrors=data.mirrors,
            public_key=data.public_key or None,
            cache_dir=data.cache_dir or None,
            cache_bytes=data.cache_bytes or None,
            timeout_s=data.timeout_s,
        )
    )


def open_dataset(config: RunConfig) -> GenesisDataset:
    """The stream of a node's batches.

    Raises:
        LoaderError: the store cannot be read.
    """
    data = config.data
    return GenesisDataset(
        data.store,
        config.node_id,
        seq_len=config.inner.seq_len,
        batch_size=config.inner.micro_batch_size,
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


def endless(dataset: Iterable[Batch]) -> Iterator[Batch]:
    """Pass after pass: after a state is loaded, the stream goes on with the next pass from there."""
    while True:
        yield from dataset
