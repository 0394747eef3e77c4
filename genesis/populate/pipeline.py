"""Populate: one source's text into one store's shards.

    tasks → worker processes (read, encode) → packer (this thread) → store threads → commit thread

The first and the fourth are an engine's (`engine.py`): processes and threads of this machine, or tasks of a cluster.

Guarantees (each held by a test): the shards are a function of the input files in order, the vocabulary and the shard
size, the same for any number of workers or machines and any history of kills; every document's ids are in the store or
behind the checkpoint exactly once; memory is bounded by workers × ring and a few shard images whatever the corpus.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from genesis.errors import (
    CorruptInputError,
    GenesisError,
    InputChangedError,
    InputNotFoundError,
    InterruptedRunError,
    LostWorkError,
    SourceError,
    TokenizerError,
    UsageError,
    WorkerError,
)
from genesis.populate.commit_log import CommitLog
from genesis.populate.committer import CommitGroup, Committer
from genesis.populate.crashpoint import crash_point
from genesis.populate.engine import PopulateEngine, make_engine
from genesis.populate.lease import LeaseKeeper, held
from genesis.populate.options import PopulateOptions
from genesis.populate.packer import Packer, Position
from genesis.populate.partial import first_document
from genesis.populate.planning import ensure_vocabulary, imported_vocabulary
from genesis.populate.pool import EncodedBlock
from genesis.populate.progress import InputPositions, Limits, PopulateProgress
from genesis.populate.remote_ids import RemoteIds
from genesis.populate.stopping import unless_stopped
from genesis.sources import InputPlan, check_repository, resolve
from genesis.sources.base import TokenRules
from genesis.sources.planning import local_path
from genesis.sources.token_files import recorded_vocabularies, token_plan
from genesis.store import Store, folder_of
from genesis.tokenizer import FrozenTokenizer, StoreTokenizer, choose_encoder
from manifests import BYTE_OFFSET, EOS_ID, Cursor, InputRead, SourceCheckpoint, format_time

logger = logging.getLogger(__name__)

_LOSSES_IN_A_ROW = 5
"""How often a cluster may lose work without a commit between: whoever loses it each time will not get anywhere."""


@dataclass(frozen=True, slots=True)
class PopulateResult:
    """What a run did, and where the source stands."""

    source: str
    shards_added: int
    total_shards: int
    """Shards of this source in the store."""
    documents: int
    """Documents processed of this source, in all."""
    rows_skipped: int
    unsharded_tokens: int
    """Ids behind the last shard, once the source or its document limit has been reached; else 0."""
    unsharded_documents: int
    text_bytes: int
    """UTF-8 bytes encoded in this run."""
    seconds: float
    ended: bool
    """The source was read to its end."""
    interrupted: bool
    """The run was asked to stop."""


def populate(
    options: PopulateOptions,
    store: Store,
    *,
    stop: threading.Event | None = None,
    sign_key: Ed25519PrivateKey | None = None,
    commit_log: CommitLog | None = None,
) -> PopulateResult:
    """Populates ``store`` from one source, going on from where its checkpoint stands.

    Args:
        options: what and how much.
        store: where to.
        stop: set it (from a signal handler, say) to commit what is in hand and return.
        sign_key: signs the manifests.
        commit_log: prepared by the caller; by default one is made from ``store`` and ``options``.

    Raises:
        GenesisError, ContractError: see the subclasses; what was committed stays, and the same call goes on once the
            cause is mended.
    """
    stop = stop or threading.Event()
    commit_log = commit_log or CommitLog(
        store,
        options.shard_tokens,
        sign_key=sign_key,
        lease_s=options.lease_s,
        superseded_keep_s=options.superseded_keep_s,
    )
    commit_log.source = options.spec.name
    _check_apart(options)
    with held(commit_log), LeaseKeeper(commit_log, on_lost=stop.set) as keeper:
        try:
            with make_engine(options) as engine:
                result = _Run(options, commit_log, stop, engine).run()
        except InterruptedRunError:
            keeper.raise_failure()
            raise
        keeper.raise_failure()
    return result


class _Run:
    """One source's run; holds what its steps share."""

    def __init__(
        self, options: PopulateOptions, commit_log: CommitLog, stop: threading.Event, engine: PopulateEngine
    ) -> None:
        self._options = options
        self._commit_log = commit_log
        self._stop = stop
        self._engine = engine
        self._name = options.spec.name
        self._tokenizer_sha256: str | None = None
        self._encoder: str | None = None

    def run(self) -> PopulateResult:
        started = time.monotonic()
        checkpoint = self._commit_log.checkpoints.sources.get(self._name)
        start = Position.from_checkpoint(checkpoint) if checkpoint else Position()
        self._plan = unless_stopped(lambda: self._resolve(start.cursor), self._stop, "listing the input")
        self._fingerprints = self._plan.fingerprints()
        names = [file.name for file in self._plan.files]
        self._file_before = dict(zip(names, [None, *names], strict=False))
        if checkpoint is None:
            self._pin_input()
        else:
            self._check_unchanged(checkpoint)
        self._engine.check(self._plan)
        tokenizer = self._vocabulary()
        self._tokenizer_sha256 = tokenizer.sha256
        encoder = choose_encoder(tokenizer.to_file())
        self._encoder = encoder.name if encoder.is_frozen else None
        self._engine.load(encoder)
        before = self._shards()
        text_before = start.text_bytes
        packer, ended = self._encode_through_losses(tokenizer, start)
        crash_point("source-finished")
        end = self._commit_log.checkpoints.sources.get(self._name) or self._checkpoint(Position(), -1)
        return PopulateResult(
            source=self._name,
            shards_added=self._shards() - before,
            total_shards=self._shards(),
            documents=end.documents_processed,
            rows_skipped=end.rows_skipped,
            unsharded_tokens=end.unsharded_tokens,
            unsharded_documents=end.unsharded_documents,
            text_bytes=(packer.text_bytes if ended else end.text_bytes) - text_before,
            seconds=time.monotonic() - started,
            ended=ended,
            interrupted=self._stop.is_set(),
        )

    def _resolve(self, cursor: Cursor | None) -> InputPlan:
        options = self._options
        if options.tokens is not None:
            return token_plan(self._name, options.tokens.token_format, options.inputs)
        check_repository(options.spec, options.inputs, cursor)
        pinned = cursor.revision if cursor is not None else ""
        return resolve(options.spec, options.inputs, pinned_revision=pinned or None)

    def _vocabulary(self) -> StoreTokenizer:
        """The vocabulary of the run; of a source that comes as ids, the plan then says what they must keep to."""
        options = self._options
        if options.tokens is None:
            return ensure_vocabulary(
                self._commit_log,
                options.spec,
                self._plan,
                options.learn,
                options.num_workers,
                self._stop,
                options.tokenizer,
            )
        tokenizer = imported_vocabulary(self._commit_log, options.tokens, recorded_vocabularies(self._plan))
        eos_id, num_special = EOS_ID, BYTE_OFFSET
        if isinstance(tokenizer, FrozenTokenizer):  # Where its special tokens lie is its maker's affair.
            eos_id, num_special = tokenizer.eos_id, 0
        rules = TokenRules(tokenizer.next_merge_id, eos_id, num_special, options.tokens.append_eos)
        self._plan = replace(self._plan, token_rules=rules)
        return tokenizer

    def _encode_through_losses(self, tokenizer: StoreTokenizer, start: Position) -> tuple[Packer[Any], bool]:
        """Runs the pipeline, beginning again from the last commit where a cluster lost what was under way."""
        losses, shards = 0, self._shards()
        while True:
            try:
                return self._encode(tokenizer, start)
            except LostWorkError as error:
                losses, shards = (losses + 1 if self._shards() == shards else 1), self._shards()
                if losses >= _LOSSES_IN_A_ROW or self._stop.is_set():
                    raise
                logger.warning("%s; going on from the last commit", error)
            checkpoint = self._commit_log.checkpoints.sources.get(self._name)
            start = Position.from_checkpoint(checkpoint) if checkpoint else start

    def _encode(self, tokenizer: StoreTokenizer, start: Position) -> tuple[Packer[Any], bool]:
        """Runs the pipeline; returns the packer as it ended and whether the source did."""
        progress = self._progress(start)
        committer = Committer(
            self._engine.storage(self._commit_log, self._name, tokenizer.next_merge_id, packed=self._options.packed),
            lambda commit: self._commit(commit, progress),
            num_threads=self._engine.store_threads(self._commit_log.store),
            interval_s=self._engine.commit_interval_s,
        )
        packer = Packer(self._plan, start, committer.new_image)
        committer.start()
        try:
            with progress.shown():
                ended = self._feed(packer, committer, progress, start)
                if ended:
                    progress.ended()
                committer.drain()
        except (SourceError, TokenizerError, WorkerError) as error:
            with suppress(GenesisError):  # What came before the failure is good; the failure is what to report.
                committer.drain()
            if isinstance(error, CorruptInputError):
                raise CorruptInputError(
                    f"{error}; everything before it was read: mend the file or get a sound copy, then run the same "
                    "command again with --mended-input"
                ) from error
            raise
        except BaseException:
            committer.abandon()
            raise
        if ended or self._documents_reached(packer):
            self._finish(packer, ended, progress.read_after(0))
        return packer, ended

    def _progress(self, start: Position) -> PopulateProgress:
        """The progress of the run, from where the checkpoint stands."""
        positions = InputPositions.of(self._plan)
        read = self._commit_log.input_read.get(self._name) if start.cursor else None
        limits = Limits(
            shards=self._options.shard_limit,
            documents=self._options.max_documents,
            shards_before=self._shards(),
            documents_before=start.documents,
            shard_tokens=self._options.shard_tokens,
            tokens_before=start.tokens_left,
        )
        read_bytes = max(read.read_bytes if read else 0, positions.at_cursor(start.cursor))
        return PopulateProgress(self._name, positions, limits, read_bytes)

    def _feed(
        self,
        packer: Packer[Any],
        committer: Committer[Any],
        progress: PopulateProgress,
        start: Position,
    ) -> bool:
        """Feeds the packer until the source ends (True) or a limit or a stop comes first (False)."""
        limit = self._options.shard_limit
        room = limit - self._shards() if limit is not None else None
        if room is not None and room <= 0:
            return False
        submitted = 0
        for shard in packer.start():
            progress.filled(progress.read_bytes)
            committer.submit(shard)
            submitted += 1
            if submitted == room or self._stop.is_set():
                return False
        if self._documents_reached(packer):
            return False
        for block in self._blocks(start):
            committer.raise_failure()
            documents, num_documents = packer.documents, len(block.ends)
            begin = progress.positions.before(block.task, block.first_row)
            end = progress.positions.before(block.task, block.end_row)
            progress.reached(begin)
            for shard in packer.feed(block, self._options.max_documents):
                share = (shard.position.documents - documents) / max(num_documents, 1)
                progress.filled(begin + int((end - begin) * share))
                committer.submit(shard)
                submitted += 1
                if submitted == room or self._stop.is_set():
                    return False
            text_bytes = int(block.text_bytes[-1]) if num_documents else 0
            progress.encoded(len(block.ids), text_bytes, num_documents, end)
            if self._stop.is_set() or self._documents_reached(packer):
                return False
        return not self._stop.is_set()

    def _blocks(self, start: Position) -> Iterator[EncodedBlock]:
        """The documents behind ``start``; from the one on that it stands in."""
        cursor, partial = start.cursor, start.partial
        checkpoint = self._commit_log.checkpoints.sources.get(self._name)
        if partial is not None and cursor is not None and checkpoint is not None:
            encoded_with = partial.tokenizer_sha256 or checkpoint.tokenizer_sha256
            if encoded_with is not None and encoded_with != self._tokenizer_sha256:
                # The vocabulary has grown since: that document is encoded as it was begun.
                block = first_document(self._plan, cursor, self._commit_log.store, encoded_with)
                yield block
                cursor = block.task.cursor(block.end_row, self._plan)
        yield from self._engine.blocks(self._plan, cursor, self._stop)

    def _documents_reached(self, packer: Packer[Any]) -> bool:
        """Whether no document is to be begun; one that was begun is brought to its end."""
        limit = self._options.max_documents
        return limit is not None and packer.documents >= limit and not packer.inside_document

    def _shards(self) -> int:
        manifest = self._commit_log.manifest
        totals = manifest.sources.get(self._name) if manifest else None
        return totals.shards if totals else 0

    def _commit(self, commit: CommitGroup, progress: PopulateProgress) -> None:
        num_tokens = sum(entry.tokens for entry in commit.entries)
        self._commit_log.tokens_per_s = round(progress.speed_with(num_tokens), 1)
        self._commit_log.commit_shards(
            commit.entries,
            self._name,
            self._checkpoint(commit.position, commit.entries[-1].id),
            progress.read_after(len(commit.entries)),
        )
        progress.committed(len(commit.entries), num_tokens)

    def _finish(self, packer: Packer[Any], ended: bool, input_read: InputRead) -> None:
        """Notes what fills no shard: it stays behind the cursor, neither padded nor lost."""
        if ended and packer.documents == 0:
            raise InputNotFoundError(
                f"{self._name}: expected text in {len(self._plan.files)} input files, found no document; check --input "
                "and the source's text_field"
            )
        present = self._commit_log.checkpoints.sources.get(self._name) or self._checkpoint(Position(), -1)
        finished = present.model_copy(
            update={
                "ended": ended,
                "unsharded_tokens": packer.unsharded_tokens,
                "unsharded_documents": packer.unsharded_documents,
            }
        )
        if finished != present:
            finished = finished.model_copy(update={"timestamp": _timestamp()})
            self._commit_log.commit_shards((), self._name, finished, input_read)

    def _pin_input(self) -> None:
        """Commits the starting position, which pins the Hub's revision before anything depends on it."""
        if not self._plan.revision:
            return
        cursor = Cursor(repo=self._plan.repo, revision=self._plan.revision, file=self._plan.files[0].name, row=0)
        self._commit_log.commit_shards((), self._name, self._checkpoint(Position(cursor=cursor), -1))

    def _checkpoint(self, position: Position, last_shard_id: int) -> SourceCheckpoint:
        if isinstance(position.leftover, RemoteIds):
            raise TypeError("expected a position with its ids, found the name of ids that are elsewhere")
        return SourceCheckpoint(
            documents_processed=position.documents,
            last_shard_id=last_shard_id,
            leftover_tokens=tuple(position.leftover.tolist()),
            partial_document=position.partial,
            timestamp=_timestamp(),
            cursor=position.cursor,
            input_fingerprint=self._fingerprints[position.cursor.file] if position.cursor else None,
            earlier_fingerprint=self._earlier_fingerprint(position.cursor),
            tokenizer_sha256=self._tokenizer_sha256,
            rows_skipped=position.rows_skipped,
            text_bytes=position.text_bytes,
            encoder=self._encoder,
        )

    def _earlier_fingerprint(self, cursor: Cursor | None) -> str | None:
        """The fingerprint of the files before the cursor's; None for the first."""
        if cursor is None:
            return None
        before = self._file_before[cursor.file]
        return self._fingerprints[before] if before is not None else None

    def _check_unchanged(self, checkpoint: SourceCheckpoint) -> None:
        cursor = checkpoint.cursor
        if cursor is None or checkpoint.input_fingerprint is None:
            return
        if self._plan.fingerprint(cursor.file) == checkpoint.input_fingerprint:
            return
        if self._earlier_fingerprint(cursor) != checkpoint.earlier_fingerprint:
            raise InputChangedError(
                f"{self._name}: the files before {cursor.file!r} are not those that {checkpoint.documents_processed} "
                "documents were read from; restore them, or populate into another store"
            )
        if not self._options.mended_input:
            raise InputChangedError(
                f"{self._name}: {cursor.file!r} was read up to row {cursor.row} and is another file now; restore it, "
                "or, if it only was mended behind that row, run the same command with --mended-input"
            )
        logger.warning("%s: going on in the mended %s behind row %d", self._name, cursor.file, cursor.row)


def _check_apart(options: PopulateOptions) -> None:
    """A store inside a folder it is made from would be read as text at the next run."""
    for pattern in options.inputs if options.store_url.startswith("s3://") else ():
        above = pattern.partition("**")[0].rstrip("/")
        if "*" not in above and f"{options.store_url.rstrip('/')}/".startswith(f"{above}/"):
            raise UsageError(f"the store {options.store_url} lies inside the input {pattern}; give another --store")
    store = folder_of(options.store_url)
    for pattern in options.inputs if store else ():
        folder = Path(local_path(pattern).partition("**")[0]).expanduser().resolve()
        if store is not None and store.is_relative_to(folder) and ("**" in pattern or folder.is_dir()):
            raise UsageError(f"the store {store} lies inside the input folder {folder}; give another --store")


def _timestamp() -> str:
    return format_time(datetime.now(UTC))
