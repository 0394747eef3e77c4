"""Which merges a store learns, when, and from which documents.

An empty store learns 31,734 merges (a vocabulary of 32,000 ids) from the first 10,000 documents of the source being
populated. A source that comes later and has not contributed adds its own share on top; one that has, learns no more.
`learn_all` instead lets every enabled source add its share, in the order of their priorities.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence

from genesis.errors import InputNotFoundError, InterruptedRunError, SourceError
from genesis.populate.commit_log import CommitLog
from genesis.populate.options import LearnOptions
from genesis.sources import read_batches, tasks
from genesis.sources.base import InputPlan
from genesis.tokenizer import NeuroTokenizer
from manifests import TOTAL_MERGES, SourceSpec

logger = logging.getLogger(__name__)


def merges_to_learn(spec: SourceSpec, tokenizer: NeuroTokenizer | None, override: int | None = None) -> int:
    """How many merges populating ``spec`` should add to the store's vocabulary."""
    if tokenizer is None or not tokenizer.merges:
        return TOTAL_MERGES if override is None else override
    if spec.name in tokenizer.sources_contributed:
        return 0
    return spec.merges if override is None else override


def first_documents(plan: InputPlan, count: int, stop: threading.Event | None = None) -> Iterator[bytes]:
    """The first ``count`` documents of a source, UTF-8.

    Raises:
        InterruptedRunError: ``stop`` was set; a vocabulary from fewer documents would be another one.
    """
    remaining = count
    for task in tasks(plan, None):
        for batch in read_batches(task):
            if stop is not None and stop.is_set():
                raise InterruptedRunError("stopped while learning the vocabulary; nothing was written")
            yield from batch.texts[:remaining]
            remaining -= len(batch.texts)
            if remaining <= 0:
                return


def ensure_vocabulary(
    commit_log: CommitLog,
    spec: SourceSpec,
    plan: InputPlan,
    options: LearnOptions,
    num_workers: int,
    stop: threading.Event | None = None,
) -> NeuroTokenizer:
    """The vocabulary to encode ``spec`` with, learned and committed first if the policy asks for it."""
    tokenizer = commit_log.read_tokenizer()
    wanted = merges_to_learn(spec, tokenizer, options.merges)
    tokenizer = tokenizer or NeuroTokenizer.empty()
    if wanted:
        _learn(tokenizer, spec, first_documents(plan, options.documents, stop), wanted, num_workers)
    commit_log.commit_vocabulary(tokenizer)
    return tokenizer


def learn_all(
    commit_log: CommitLog, plans: Sequence[tuple[SourceSpec, InputPlan]], options: LearnOptions, num_workers: int
) -> NeuroTokenizer:
    """Lets each source that has not contributed add its share, and commits the vocabulary once."""
    tokenizer = commit_log.read_tokenizer() or NeuroTokenizer.empty()
    for spec, plan in plans:
        if spec.name in tokenizer.sources_contributed:
            logger.info("%s has contributed %d merges already", spec.name, tokenizer.sources_contributed[spec.name])
        elif spec.merges:
            _learn(tokenizer, spec, first_documents(plan, options.documents), spec.merges, num_workers)
    commit_log.commit_vocabulary(tokenizer)
    return tokenizer


def _learn(
    tokenizer: NeuroTokenizer, spec: SourceSpec, documents: Iterator[bytes], merges: int, num_workers: int
) -> None:
    logger.info("learning %s merges from the first documents of %s", f"{merges:,}", spec.name)
    try:
        first = next(documents, None)
        if first is None:
            raise InputNotFoundError(
                f"{spec.name}: expected text to learn from, found no document; check --input and the text_field"
            )
        learned = tokenizer.learn_merges(
            itertools.chain([first], documents), merges, source=spec.name, processes=num_workers
        )
    except SourceError as error:
        raise type(error)(f"while learning the vocabulary, so that nothing was written: {error}") from None
    if learned < merges:
        logger.warning("%s: only %d of %d merges occur twice or more in that text", spec.name, learned, merges)
    logger.info("the vocabulary has %s ids", f"{tokenizer.current_vocab_size:,}")
