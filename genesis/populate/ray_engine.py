"""Populate on a Ray cluster: the same plan, the same bytes, on any number of machines.

    reader actor ─tasks, text that cannot be split─▶ encode tasks ─ids stay where they are─▶ store tasks ─▶ the store
         ▲                                              │ counts                   ▲            │ digests
         └────────────────────────────────── the driver: cuts by counts, names the pieces, commits in order

What crosses the driver are names, counts and digests: some 30 kB a shard of 20 MB. A shard is made by the machine that
has most of its ids and put to the store from there. The driver is the one writer of the store: lease, ledger and
checkpoint are those of the local engine (`pipeline.py`), and so is the order of commits.

- *Bounded.* Two encode calls for each processor and a few shards for each machine are under way, whatever the corpus; a
  result's memory is given back with the shards that it went into.
- *A call costs the driver 2 to 3 ms of processor time*, most of it in Ray. So one call encodes some 32 MB of text.
- *A machine that dies* costs its tasks. Ray does those again whose input is a file; where that is not enough (the text
  of a compressed file was in its memory), `LostWorkError` has the pipeline begin again from the last commit.
- *A driver that dies* is started again and goes on from the checkpoint, like any run.

Ray schedules; the soft wish of a store task for the machine that has its ids is all that is asked of it. Its own output
is kept from the user's terminal, and the signal handlers stay the caller's.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import genesis
from genesis.errors import GenesisError, LostWorkError, StoreUnavailableError, UsageError, WorkerError
from genesis.populate.commit_log import CommitLog
from genesis.populate.committer import ShardFacts, StoredShard
from genesis.populate.engine import store_threads
from genesis.populate.options import PopulateOptions
from genesis.populate.packer import FilledShard
from genesis.populate.pool import EncodedBlock, as_error, describe_task
from genesis.populate.progress import InputPositions
from genesis.populate.ray_cluster import connected, first_line
from genesis.populate.ray_tasks import (
    MAX_TASKS_PER_CALL,
    EncodedGroup,
    Encoder,
    Needs,
    NeedsLease,
    Part,
    ShardPlan,
    StoredOnNode,
    TaskGroup,
    TaskReader,
    encode,
    missing,
    store_shard,
)
from genesis.populate.remote_ids import RemoteIds, RemoteImage
from genesis.populate.ring import Failed
from genesis.sources.base import InputPlan, Task, WholeFilesTask
from genesis.sources.opening import is_remote
from genesis.store import ObjectInfo, Store, folder_of
from genesis.tokenizer import EncoderSpec
from manifests import Cursor, sha256_hex

logger = logging.getLogger(__name__)

_GROUPS_PER_SLOT = 2
_CALLS_AHEAD = 2
_MAX_SHARDS_IN_FLIGHT = 64
_COMMIT_INTERVAL_S = 1.0
_RETRIES = 5
_WAKE_S = 1.0
_COUNT_EVERY_S = 10.0
_SILENCE_WARN_S = 60.0
_SILENCE_S = 3600.0
"""A result that is owed for this long is given up. Reading from the Hub may honestly take several requests of 900 s."""
_PROBE_S = 120.0
_NO_MACHINE_S = 60.0
_PROBED_FILES = 16
_LEASE_ROUNDS = 4
_NO_IDS = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class _Encoding:
    """A group of tasks under way."""

    group: tuple[Task, ...]
    texts: Any
    """Names the texts of the group and of what came before it in the same; None if its tasks read their own."""
    first_text: int
    ids: Any
    summary: Any


class RayEngine:
    """A Ray cluster, one of this machine alone or one that runs already; a context manager.

    Args:
        options: where the cluster is, and how much of it to use.
    """

    def __init__(self, options: PopulateOptions) -> None:
        self._options = options
        self._exits = ExitStack()
        self._encoder: Encoder | None = None
        self._encode: Any = None
        self._store_shard: Any = None
        self._slots = 0
        self._counted_at = 0.0

    def __enter__(self) -> Self:
        """Starts the cluster, or joins it.

        Raises:
            UsageError: there is no cluster at that address.
            WorkerError: none could be started here.
        """
        with ExitStack() as on_failure:
            on_failure.enter_context(connected(self._options))
            self._exits = on_failure.pop_all()
        self._encode = ray.remote(num_cpus=1, num_returns=2, max_retries=_RETRIES)(encode)
        self._store_shard = ray.remote(num_cpus=0, max_retries=_RETRIES)(store_shard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the cluster; what it still does for this run is not wanted."""
        self._exits.__exit__(kind, error, trace)

    def check(self, plan: InputPlan) -> None:
        """Asks every machine whether it sees input and store, and has this release.

        A machine that is gone before it has answered is nobody's fault.

        Raises:
            UsageError: one does not; the message names it.
        """
        with ExitStack() as stack:
            token = None
            folder = folder_of(self._options.store_url)
            if folder is not None:
                token = stack.enter_context(_token_in(folder))
            needs = Needs(
                genesis.__version__,
                platform.python_version(),
                _some_files(plan),
                self._store_url,
                token,
            )
            ask = ray.remote(num_cpus=0, max_retries=_RETRIES)(missing)
            answers = {
                node["NodeID"]: (_name_of(node), ask.options(scheduling_strategy=_on(node["NodeID"])).remote(needs))
                for node in _machines()
            }
            for node_id, (name, answer) in answers.items():
                lacking = self._answer(answer)
                if lacking is not None and any(node["NodeID"] == node_id for node in _machines()):
                    raise UsageError(
                        f"machine {name} of the cluster {lacking}; give every machine the same disk, or use "
                        "s3:// for the store and the Hub for the input"
                    )
        self._count_slots()
        logger.info("cluster of %d machines, %d processors", len(answers), self._slots)

    def load(self, encoder: EncoderSpec) -> None:
        """Puts the vocabulary where every machine gets it, once."""
        digest = sha256_hex(f"{encoder.name} {encoder.eos_id}\n".encode() + encoder.hf_json)
        self._encoder = Encoder(sha256=digest, reference=[ray.put(encoder)], narrow=_is_narrow(encoder))

    def blocks(self, plan: InputPlan, cursor: Cursor | None, stop: threading.Event) -> Iterator[EncodedBlock]:
        """The plan's documents from the cursor on, encoded, in order.

        Raises:
            LostWorkError: a machine went with what cannot be done again from here.
            GenesisError: reading or encoding failed, after everything before it.
        """
        window: deque[_Encoding] = deque()
        with _Reader(plan, cursor) as reader:
            try:
                while not stop.is_set():
                    with _as_genesis_errors():
                        self._fill(window, reader)
                        ready = self._head(window, reader)
                    if ready is None:
                        if not window and reader.ended:
                            break
                        continue
                    yield from self._take(window, *ready)
                if reader.failure is not None and not window and not stop.is_set():
                    raise reader.failure
            finally:
                _give_up(window)

    def storage(self, commit_log: CommitLog, source: str, next_merge_id: int, *, packed: bool) -> RayShardStorage:
        """Has shards made and stored by the machines that have their ids."""
        return RayShardStorage(commit_log, source, next_merge_id, packed, self._store_url, self._store_shard)

    @property
    def commit_interval_s(self) -> float:
        """A second: a driver commits for a whole cluster, and a commit costs it as much as naming a shard's pieces."""
        return _COMMIT_INTERVAL_S

    def store_threads(self, store: Store) -> int:
        """As many for each machine as the local engine would have there; a thread here only waits."""
        threads = [store_threads(store, int(node["Resources"]["CPU"])) for node in _machines()]
        return min(max(sum(threads), 2), _MAX_SHARDS_IN_FLIGHT)

    @property
    def _store_url(self) -> str:
        """The store's address wherever it is opened."""
        folder = folder_of(self._options.store_url)
        return self._options.store_url if folder is None else str(folder)

    def _answer(self, answer: Any) -> str | None:
        """What a machine lacks, as the end of a sentence; None if nothing."""
        try:
            lacking: str | None = ray.get(answer, timeout=_PROBE_S)
        except GetTimeoutError:
            return f"does not answer within {_PROBE_S:.0f} s"
        except RayError as error:
            return f"cannot run genesis {genesis.__version__} ({first_line(error)})"
        return lacking

    def _count_slots(self) -> None:
        if time.monotonic() - self._counted_at < _COUNT_EVERY_S and self._slots:
            return
        self._counted_at = time.monotonic()
        processors = int(sum(node["Resources"]["CPU"] for node in _machines()))
        self._slots = max(min(processors, self._options.max_encoding or processors), 1)

    def _fill(self, window: deque[_Encoding], reader: _Reader) -> None:
        """Has as many tasks under way as there is room for."""
        self._count_slots()
        reader.ask(_GROUPS_PER_SLOT * self._slots)
        while len(window) <= _GROUPS_PER_SLOT * self._slots:
            named = reader.take()
            if named is None:
                return
            window.append(self._start(*named))

    def _start(self, group: tuple[Task, ...], texts: Any, first_text: int = 0) -> _Encoding:
        ids, summary = self._encode.remote(group, self._encoder, texts, first_text)
        return _Encoding(group, texts, first_text, ids, summary)

    def _head(self, window: deque[_Encoding], reader: _Reader) -> tuple[EncodedGroup, Any] | None:
        """What the group in turn gave; None if that is not known yet, after waiting a while."""
        awaited = [window[0].summary] if window else []
        if not reader.ended and len(window) <= _GROUPS_PER_SLOT * self._slots:
            awaited += reader.pending
        if not awaited:
            return None
        ready, _ = ray.wait(awaited, num_returns=1, timeout=_WAKE_S)
        if not window or window[0].summary not in ready:
            if window:
                reader.watch(describe_task(window[0].group[0]))
            return None
        reader.heard()
        return ray.get(window[0].summary), window[0].ids

    def _take(self, window: deque[_Encoding], encoded: EncodedGroup, ids: Any) -> Iterator[EncodedBlock]:
        """The documents of the group in turn, which goes on if it is not read to its end."""
        done = window.popleft()
        if encoded.failure is None:
            num_done = sum(piece.complete for piece in encoded.pieces)
            rest = done.group[num_done:]
            if num_done < len(encoded.pieces):
                rest = (replace(rest[0], first_row=encoded.pieces[-1].end_row), *rest[1:])
            if rest:
                window.appendleft(self._start(rest, done.texts, done.first_text + num_done))
        start = 0
        for task, piece in zip(done.group, encoded.pieces, strict=False):
            if encoded.failure is not None and piece.end_row == task.first_row:
                break  # Nothing came before the failure.
            ends = np.cumsum(piece.num_ids, dtype=np.int64)
            stop = start + (int(ends[-1]) if len(ends) else 0)
            yield EncodedBlock(
                task=task,
                ids=RemoteIds(ids, encoded.node_id, start, stop),
                ends=ends,
                rows=np.arange(task.first_row, task.first_row + len(ends)) if piece.rows is None else piece.rows,
                text_bytes=np.cumsum(piece.text_bytes, dtype=np.int64),
                first_row=task.first_row,
                end_row=piece.end_row,
            )
            start = stop
        if encoded.failure is not None:
            raise as_error(encoded.failure, done.group[len(encoded.pieces) - 1])


class _Reader:
    """The input's tasks, read on some machine of the cluster a few calls ahead; a context manager."""

    def __init__(self, plan: InputPlan, cursor: Cursor | None) -> None:
        self._plan = plan
        self._cursor = cursor
        self._positions = InputPositions.of(plan)
        self._num_tasks = 0
        self._tasks_left = 0
        self._actor: Any = None
        self._calls: deque[tuple[Any, Any]] = deque()
        self._groups: deque[tuple[tuple[Task, ...], Any]] = deque()
        self._last_call_made = False
        self._heard_at = time.monotonic()
        self._warned_at = self._heard_at
        self.failure: GenesisError | None = None

    def __enter__(self) -> Self:
        with _as_genesis_errors():
            home = max(_machines(), key=lambda node: (node["Resources"]["CPU"], node["NodeID"]))["NodeID"]
            remote = ray.remote(num_cpus=0, max_restarts=0)(TaskReader)
            self._actor = remote.options(scheduling_strategy=_on(home, soft=True)).remote(self._plan, self._cursor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.clear()
        self._groups.clear()
        with suppress(RayError):
            ray.kill(self._actor)

    @property
    def pending(self) -> list[Any]:
        """What to wait for: the answer of the first call."""
        return [self._calls[0][0]] if self._calls else []

    @property
    def ended(self) -> bool:
        """Whether every task there is has been taken."""
        return self._last_call_made and not self._calls and not self._groups

    def ask(self, places: int) -> None:
        """Keeps a few calls under way, each for a group of tasks.

        Groups grow from one task, so that each of the ``places`` has work at once, and shrink again towards the end,
        so that they end together (guided self-scheduling: Polychronopoulos and Kuck 1987).
        """
        share = min(self._num_tasks, self._tasks_left) // places
        limit = min(max(share, 1), MAX_TASKS_PER_CALL)
        while not self._last_call_made and len(self._calls) < _CALLS_AHEAD and not self._groups:
            group, texts = self._actor.next.options(num_returns=2).remote(limit)
            self._calls.append((group, texts))

    def take(self) -> tuple[tuple[Task, ...], Any] | None:
        """The next group and its texts, where it has some; None if there is none yet, or (``ended``) ever."""
        if not self._groups and not self._hear():
            return None
        return self._groups.popleft() if self._groups else None

    def heard(self) -> None:
        """Notes a sign of life."""
        self._heard_at = time.monotonic()

    def watch(self, awaited: str) -> None:
        """Complains about a silence, and does not wait for ever.

        Raises:
            LostWorkError: it has lasted too long.
        """
        silent_s = time.monotonic() - self._heard_at
        if silent_s > _SILENCE_S:
            raise LostWorkError(f"the cluster has not encoded {awaited} for {silent_s:.0f} s")
        if silent_s > _SILENCE_WARN_S and time.monotonic() - self._warned_at > _SILENCE_WARN_S:
            self._warned_at = time.monotonic()
            logger.warning("waiting for the cluster to encode %s, for %.0f s so far", awaited, silent_s)

    def _hear(self) -> bool:
        """Takes in the answer of the first call, if it is there."""
        if not self._calls or not ray.wait([self._calls[0][0]], timeout=0)[0]:
            return False
        first, texts = self._calls.popleft()
        named: TaskGroup = ray.get(first)
        if named.tasks:
            self._groups.append((named.tasks, texts if named.has_text else None))
            self._num_tasks += len(named.tasks)
            self._tasks_left = self._tasks_behind(named.tasks[-1])
        if named.ended:
            self._last_call_made = True
            self._calls.clear()
        if named.failure is not None:
            self.failure = _error_of(named.failure)
        return True

    def _tasks_behind(self, task: Task) -> int:
        """About how many tasks like this one are behind it, by stored bytes."""
        end_row = len(task.files) if isinstance(task, WholeFilesTask) else sys.maxsize
        end = self._positions.before(task, end_row)
        size_bytes = max(end - self._positions.before(task, task.first_row), 1)
        return (self._positions.total_bytes - end) // size_bytes


@dataclass(frozen=True, slots=True)
class RayShardStorage:
    """Has shards made and stored where their ids are; called from several threads, each of which only waits.

    Attributes:
        commit_log: the store's, open.
        source: name of the source.
        next_merge_id: of the vocabulary the shards are written with.
        packed: also write the transfer form.
        store_url: the store's address on every machine.
        store_shard: `ray_tasks.store_shard`, remote.
    """

    commit_log: CommitLog
    source: str
    next_merge_id: int
    packed: bool
    store_url: str
    store_shard: Any

    def new_image(self) -> RemoteImage:
        """One more shard to name the pieces of."""
        return RemoteImage.empty(self.commit_log.shard_tokens)

    def store(self, shard_id: int, shard: FilledShard[RemoteImage]) -> StoredShard:
        """Has a shard made and stored.

        Raises:
            LostWorkError: its ids are gone with their machine.
            GenesisError: the store cannot be written, or was taken over.
        """
        arrays: list[Any] = []
        parts = tuple(_part(arrays, piece) for piece in shard.image.ids.parts)
        leftover = shard.position.leftover
        plan = ShardPlan(
            facts=ShardFacts(
                shard_id=shard_id,
                source=self.source,
                first_document=shard.first_document,
                last_document=shard.last_document,
                next_merge_id=self.next_merge_id,
                packed=self.packed,
            ),
            num_tokens=len(shard.image.ids),
            parts=parts,
            leftover=_part(arrays, leftover) if isinstance(leftover, RemoteIds) and len(leftover) else None,
            store_url=self.store_url,
        )
        try:
            stored = self._stored(plan, arrays, shard.image.home)
        finally:
            shard.image.clear()
        position = shard.position
        if isinstance(leftover, RemoteIds):
            position = replace(position, leftover=_NO_IDS if stored.leftover is None else stored.leftover)
        return StoredShard(stored.entry, position)

    def _stored(self, plan: ShardPlan, arrays: list[Any], home: str) -> StoredOnNode:
        remote = self.store_shard.options(scheduling_strategy=_on(home, soft=True)) if home else self.store_shard
        for _ in range(_LEASE_ROUNDS):
            with _as_genesis_errors():
                answer: StoredOnNode | NeedsLease | Failed = ray.get(remote.remote(plan, *arrays), timeout=_SILENCE_S)
            if isinstance(answer, StoredOnNode):
                return answer
            if isinstance(answer, Failed):
                raise _error_of(answer)
            self.commit_log.renew()  # After the machine has read what it is to replace.
            granted: tuple[str, ObjectInfo | None] = (answer.key, answer.found)
            plan = replace(plan, replaceable=(*plan.replaceable, granted))
        raise StoreUnavailableError(f"{self.store_url}: shard {plan.facts.shard_id} is replaced by somebody else too")


def _part(arrays: list[Any], ids: Any) -> Part:
    """Names ids as a piece of one of ``arrays``, to which their array is added unless it is the last one."""
    reference, start, stop = (ids.reference, ids.start, ids.stop) if isinstance(ids, RemoteIds) else (ids, 0, len(ids))
    if not arrays or arrays[-1] is not reference:
        arrays.append(reference)
    return Part(len(arrays) - 1, start, stop)


def _is_narrow(encoder: EncoderSpec) -> bool:
    document = json.loads(encoder.hf_json)
    added = [token["id"] for token in document.get("added_tokens", ())]
    highest: int = max(encoder.eos_id, *document["model"]["vocab"].values(), *added)
    return highest < 1 << 16


def _error_of(failed: Failed) -> GenesisError:
    kind = getattr(genesis.errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, GenesisError):
        return kind(failed.message)
    return WorkerError(f"a machine of the cluster failed: {failed.error}: {failed.message}")


@contextmanager
def _as_genesis_errors() -> Iterator[None]:
    """Tells what Ray lost, which can be done again, from what failed, which would fail again."""
    try:
        yield
    except GetTimeoutError as error:
        raise LostWorkError(f"the cluster owes a result for {_SILENCE_S:.0f} s: {first_line(error)}") from None
    except RayTaskError as error:
        if isinstance(error.cause, RayError):
            raise LostWorkError(f"a machine went with its work ({first_line(error.cause)})") from None
        raise WorkerError(f"a machine of the cluster failed: {first_line(error.cause or error)}") from None
    except RayError as error:
        raise LostWorkError(f"a machine went with its work ({type(error).__name__})") from None


def _give_up(window: deque[_Encoding]) -> None:
    """Ends the tasks whose results nobody wants any more."""
    for encoding in window:
        with suppress(RayError, ValueError, TypeError):
            ray.cancel(encoding.summary, force=True)
    window.clear()


def _machines() -> list[dict[str, Any]]:
    """The machines that are alive and have processors to lend; where there is none, one may come yet.

    Raises:
        LostWorkError: none has come.
    """
    deadline = time.monotonic() + _NO_MACHINE_S
    while time.monotonic() < deadline:
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if alive:
            return alive
        time.sleep(_WAKE_S)
    raise LostWorkError("no machine of the cluster has a processor to lend; start one with 'ray start'")


def _name_of(node: dict[str, Any]) -> str:
    return str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or node["NodeID"])


def _on(node_id: str, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=soft)


def _some_files(plan: InputPlan) -> tuple[tuple[str, int, str], ...]:
    """Local input to be looked for: the last file, and the first of each of some folders."""
    local = [file for file in plan.files if not is_remote(file)]
    chosen = {str(Path(file.location).parent): file for file in reversed(local)}
    some = [*local[-1:], *list(chosen.values())[:_PROBED_FILES]]
    return tuple((file.location, file.size_bytes, file.digest) for file in some)


@contextmanager
def _token_in(folder: Path) -> Iterator[tuple[str, str]]:
    """A file in the store's folder, for the machines to find: its path and what is in it."""
    content = secrets.token_hex(16)
    path = folder / f".probe-{content}"
    path.write_text(content, encoding="ascii")
    try:
        yield str(path), content
    finally:
        path.unlink(missing_ok=True)
