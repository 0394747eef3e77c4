"""What a run will do: which merges a store learns, when, from which documents; and ``--dry-run``, which only tells.

An empty store learns 31,734 merges (a vocabulary of 32,000 ids) from the first 10,000 documents of the source being
populated. A source that comes later and has not contributed adds its own share on top; one that has, learns no more.
`learn_all` instead lets every enabled source add its share, in the order of their priorities.

A store that is given a vocabulary made elsewhere before it has any keeps that one, and learns nothing.

A dry run tells what a populate would read, learn and write, and whether there is room for it. It writes nothing.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from genesis.errors import (
    CorruptInputError,
    InputNotFoundError,
    ObjectNotFoundError,
    SourceError,
    UsageError,
    VocabularyMismatchError,
)
from genesis.populate.commit_log import CommitLog, read_checkpoints
from genesis.populate.options import LearnOptions, PopulateOptions, TokenOptions
from genesis.populate.packer import Position
from genesis.populate.progress import (
    BYTES_PER_TOKEN,
    PACKED_BYTES_PER_TOKEN,
    InputPositions,
    LearnProgress,
    expected_text_bytes,
    format_size,
)
from genesis.populate.stopping import iterate_unless_stopped
from genesis.sources import check_repository, read_batches, resolve, tasks
from genesis.sources.base import InputPlan
from genesis.store import Store, folder_of
from genesis.tokenizer import FrozenTokenizer, NeuroTokenizer, StoreTokenizer, read_tokenizer, refuse_growth
from manifests import (
    TOKENIZER_KEY,
    TOTAL_MERGES,
    FrozenVocabularyFile,
    SourceSpec,
    shard_file_bytes,
    vocabulary_key,
)

logger = logging.getLogger(__name__)


def merges_to_learn(spec: SourceSpec, tokenizer: StoreTokenizer | None, override: int | None = None) -> int:
    """How many merges populating ``spec`` should add to the store's vocabulary; none to one made elsewhere."""
    if isinstance(tokenizer, FrozenTokenizer):
        return 0
    if tokenizer is None or not tokenizer.merges:
        return TOTAL_MERGES if override is None else override
    if spec.name in tokenizer.sources_contributed:
        return 0
    return spec.merges if override is None else override


def first_documents(
    plan: InputPlan, count: int, stop: threading.Event | None = None, progress: LearnProgress | None = None
) -> Iterator[bytes]:
    """The first ``count`` documents of a source, UTF-8; counted by ``progress``.

    Raises:
        InterruptedRunError: ``stop`` was set; a vocabulary from fewer documents would be another one.
    """
    remaining = count
    batches = ((task, batch) for task in tasks(plan, None) for batch in read_batches(task))
    for task, batch in iterate_unless_stopped(batches, stop, "learning the vocabulary"):
        texts = batch.texts[:remaining]
        yield from texts
        remaining -= len(batch.texts)
        if progress is not None:
            progress.read(len(texts), progress.positions.before(task, batch.end_row))
        if remaining <= 0:
            return


def ensure_vocabulary(
    commit_log: CommitLog,
    spec: SourceSpec,
    plan: InputPlan,
    options: LearnOptions,
    num_workers: int,
    stop: threading.Event | None = None,
    given: FrozenVocabularyFile | None = None,
) -> StoreTokenizer:
    """The vocabulary to encode ``spec`` with, committed first if it is learned or ``given`` now.

    Raises:
        UsageError: the store has another vocabulary than the given one, or one that cannot learn what was asked for.
    """
    tokenizer = chosen_tokenizer(commit_log.read_tokenizer(), given, options, commit_log.store.url)
    if isinstance(tokenizer, FrozenTokenizer):
        commit_log.commit_vocabulary(tokenizer)
        return tokenizer
    wanted = merges_to_learn(spec, tokenizer, options.merges)
    tokenizer = tokenizer or NeuroTokenizer.empty()
    if wanted:
        _learn(tokenizer, spec, plan, options, wanted, num_workers, stop)
    commit_log.commit_vocabulary(tokenizer)
    return tokenizer


def imported_vocabulary(commit_log: CommitLog, options: TokenOptions, recorded: Mapping[str, str]) -> StoreTokenizer:
    """The vocabulary of ids that come as they are, committed if the store had none or an earlier state of it.

    Args:
        commit_log: the store's, open.
        options: of the import.
        recorded: digests of the vocabularies that input files say they were made with, by the files' names.

    Raises:
        UsageError: neither the store nor the options have a vocabulary.
        VocabularyMismatchError: the ids are of another vocabulary than the store's.
    """
    present = commit_log.read_tokenizer()
    given = NeuroTokenizer.from_file(options.vocabulary) if options.vocabulary is not None else None
    if present is None and given is None:
        raise UsageError(
            f"{commit_log.store.url}: expected a vocabulary that the ids are of, found none; give --tokenizer, the "
            "tokenizer.json they were made with"
        )
    if isinstance(present, FrozenTokenizer):
        newest: StoreTokenizer = _only(present, given)
    else:
        newest = _newer(present, given)
    states = {each.sha256 for each in (present, given) if each is not None}
    for name, digest in recorded.items():
        if digest not in states and commit_log.store.head(vocabulary_key(digest)) is None:
            raise VocabularyMismatchError(
                f"{name} was made with the vocabulary {digest}, which is no state of that of {commit_log.store.url} "
                f"({newest.sha256}); import it into a store of its own, with --tokenizer"
            )
    commit_log.commit_vocabulary(newest)
    return newest


def _only(present: FrozenTokenizer, given: NeuroTokenizer | None) -> FrozenTokenizer:
    if given is not None:
        raise VocabularyMismatchError(
            "--tokenizer: expected none, since the store's vocabulary was made elsewhere; import the ids into another "
            "store"
        )
    return present


def _newer(present: NeuroTokenizer | None, given: NeuroTokenizer | None) -> NeuroTokenizer:
    """Of two states of one vocabulary the later one."""
    known = [each for each in (present, given) if each is not None]
    shorter, longer = min(known, key=lambda each: len(each.merges)), max(known, key=lambda each: len(each.merges))
    if list(longer.merges[: len(shorter.merges)]) != list(shorter.merges):
        raise VocabularyMismatchError(
            "--tokenizer: expected the store's vocabulary, an earlier state of it or one that extends it, found "
            "another; ids mean what their vocabulary says: import them into another store"
        )
    return present if present is not None and len(present.merges) == len(longer.merges) else longer


def chosen_tokenizer(
    present: StoreTokenizer | None, given: FrozenVocabularyFile | None, options: LearnOptions, url: str
) -> StoreTokenizer | None:
    """The store's vocabulary, or the one given where it has none; None where it is to learn one.

    Args:
        present: the store's.
        given: what ``--tokenizer`` names.
        options: what is to be learned.
        url: the store's address, for messages.

    Raises:
        UsageError: the store has another, or merges are to be learned into one made elsewhere.
    """
    tokenizer = FrozenTokenizer(given) if given is not None and present is None else present
    if isinstance(tokenizer, FrozenTokenizer) and options.merges:
        raise UsageError(
            f"--merges {options.merges}: expected none for {url}, whose vocabulary was made elsewhere and neither "
            "learns nor grows; leave --merges out"
        )
    if given is None or present is None:
        return tokenizer
    if not isinstance(present, FrozenTokenizer):
        raise UsageError(
            f"{url} has a vocabulary of its own ({present.next_merge_id} ids); leave --tokenizer out, or populate "
            "another --store with it"
        )
    ours = present.to_file()
    if (ours.tokenizer_sha256, ours.eos) != (given.tokenizer_sha256, given.eos):
        raise UsageError(
            f"{url} has the vocabulary of sha256 {ours.tokenizer_sha256[:12]} with EOS {ours.eos.token}, asked for "
            f"{given.tokenizer_sha256[:12]} with EOS {given.eos.token}; leave --tokenizer and --eos out, or populate "
            "another --store"
        )
    return present


def learn_all(
    commit_log: CommitLog,
    plans: Sequence[tuple[SourceSpec, InputPlan]],
    options: LearnOptions,
    num_workers: int,
    stop: threading.Event | None = None,
) -> NeuroTokenizer:
    """Lets each source that has not contributed add its share, and commits the vocabulary once.

    Raises:
        InterruptedRunError: ``stop`` was set; nothing was committed.
    """
    tokenizer = refuse_growth(commit_log.read_tokenizer(), commit_log.store.url) or NeuroTokenizer.empty()
    for spec, plan in plans:
        if spec.name in tokenizer.sources_contributed:
            logger.info("%s has contributed %d merges already", spec.name, tokenizer.sources_contributed[spec.name])
        elif spec.merges:
            _learn(tokenizer, spec, plan, options, spec.merges, num_workers, stop)
    commit_log.commit_vocabulary(tokenizer)
    return tokenizer


def _learn(
    tokenizer: NeuroTokenizer,
    spec: SourceSpec,
    plan: InputPlan,
    options: LearnOptions,
    merges: int,
    num_workers: int,
    stop: threading.Event | None,
) -> None:
    logger.info("learning %s merges from the first documents of %s", f"{merges:,}", spec.name)
    progress = LearnProgress(spec.name, InputPositions.of(plan), options.documents, merges)
    documents = first_documents(plan, options.documents, stop, progress)
    try:
        with progress.shown():
            first = next(documents, None)
            if first is None:
                raise InputNotFoundError(
                    f"{spec.name}: expected text to learn from, found no document; check --input and the text_field"
                )
            learned = tokenizer.learn_merges(
                _then(itertools.chain([first], documents), progress.all_read),
                merges,
                source=spec.name,
                processes=num_workers,
                on_merge=progress.merged,
            )
    except CorruptInputError as error:
        raise CorruptInputError(
            f"while learning the vocabulary, so that nothing was written: {error}; mend the file or get a sound copy, "
            "then run the same command again"
        ) from None
    except SourceError as error:
        raise type(error)(f"while learning the vocabulary, so that nothing was written: {error}") from None
    if learned < merges:
        logger.warning("%s: only %d of %d merges occur twice or more in that text", spec.name, learned, merges)
    logger.info("the vocabulary has %s ids", f"{tokenizer.current_vocab_size:,}")


def _then(documents: Iterator[bytes], at_end: Callable[[], None]) -> Iterator[bytes]:
    yield from documents
    at_end()


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The answer; figures marked estimated are good to a factor of 1.3 or so."""

    source: str
    store: str
    files: int
    stored_bytes: int
    revision: str
    documents_before: int
    next_file: str
    """Where reading would go on; empty for the beginning."""
    estimated_text_bytes: int
    merges_to_learn: int
    learn_documents: int
    shards_before: int
    """Shards of this source in the store."""
    estimated_new_shards: int
    estimated_new_bytes: int
    """Of both forms, where both are written."""
    free_bytes: int | None
    """Free space where the store is; None where that cannot be asked."""
    vocabulary: str = ""
    """What the documents would be encoded with, if it was made elsewhere; else empty."""

    def lines(self) -> list[str]:
        """For people."""
        where = (
            f"from {self.next_file}, after {self.documents_before:,} documents" if self.next_file else "from the start"
        )
        revision = f" at {self.revision[:12]}" if self.revision else ""
        learn = (
            f"nothing: {self.vocabulary}"
            if self.vocabulary
            else f"{self.merges_to_learn:,} merges from the first {self.learn_documents:,} documents"
            if self.merges_to_learn
            else "nothing: the store has its vocabulary"
        )
        lines = [
            f"{self.source} into {self.store} (dry run, nothing is written)",
            f"  read   {self.files} files, {format_size(self.stored_bytes)}{revision}, {where}; "
            f"about {format_size(self.estimated_text_bytes)} of text",
            f"  learn  {learn}",
            f"  write  about {self.estimated_new_shards:,} shards, {format_size(self.estimated_new_bytes)}, "
            f"on top of {self.shards_before:,}",
        ]
        if self.free_bytes is not None:
            verdict = "enough" if self.free_bytes > self.estimated_new_bytes else "NOT ENOUGH"
            lines.append(f"  space  {format_size(self.free_bytes)} free: {verdict}")
        return lines


def plan_run(options: PopulateOptions, store: Store) -> PlannedRun:
    """Works out what `genesis.populate.pipeline.populate` would do with the same options.

    Raises:
        GenesisError, ContractError: what the real run would fail with at its start.
    """
    checkpoints, _ = read_checkpoints(store)
    checkpoint = checkpoints.sources.get(options.spec.name)
    start = Position.from_checkpoint(checkpoint) if checkpoint else Position()
    pinned = start.cursor.revision if start.cursor else ""
    check_repository(options.spec, options.inputs, start.cursor)
    plan = resolve(options.spec, options.inputs, pinned_revision=pinned or None)
    manifest = checkpoints.manifest
    tokenizer = chosen_tokenizer(_tokenizer(store), options.tokenizer, options.learn, store.url)
    totals = manifest.sources.get(options.spec.name) if manifest else None
    shards_before = totals.shards if totals else 0
    text_bytes = expected_text_bytes(plan, start) or 0.0
    if options.max_documents is not None and start.documents:
        per_document = start.text_bytes / start.documents
        text_bytes = min(text_bytes, max(options.max_documents - start.documents, 0) * per_document)
    shards = int(text_bytes / BYTES_PER_TOKEN / options.shard_tokens)
    if options.shard_limit is not None:
        shards = max(min(shards, options.shard_limit - shards_before), 0)
    return PlannedRun(
        source=options.spec.name,
        store=store.url,
        files=len(plan.files),
        stored_bytes=plan.size_bytes,
        revision=plan.revision,
        documents_before=start.documents,
        next_file=start.cursor.file if start.cursor and start.documents else "",
        estimated_text_bytes=int(text_bytes),
        merges_to_learn=merges_to_learn(options.spec, tokenizer, options.learn.merges),
        learn_documents=options.learn.documents,
        shards_before=shards_before,
        estimated_new_shards=shards,
        estimated_new_bytes=shards * _stored_bytes(options),
        free_bytes=_free_bytes(options.store_url),
        vocabulary=_described(tokenizer),
    )


def _described(tokenizer: StoreTokenizer | None) -> str:
    if not isinstance(tokenizer, FrozenTokenizer):
        return ""
    file = tokenizer.to_file()
    return f"{file.next_merge_id:,} ids of {file.origin}, EOS {file.eos.token} ({file.eos_id})"


def _stored_bytes(options: PopulateOptions) -> int:
    """Estimated size of a shard in the forms asked for."""
    packed = int(options.shard_tokens * PACKED_BYTES_PER_TOKEN) if options.packed else 0
    return shard_file_bytes(options.shard_tokens) + packed


def _tokenizer(store: Store) -> StoreTokenizer | None:
    try:
        return read_tokenizer(store.get(TOKENIZER_KEY).body)
    except ObjectNotFoundError:
        return None


def _free_bytes(url: str) -> int | None:
    folder = folder_of(url)
    if folder is None:
        return None
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
