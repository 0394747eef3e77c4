"""The state that the ledger's records add up to: open micro-batches one by one, settled ones as counts.

A settled micro-batch needs no memory: it was leased (its shard's cursor says so) and is neither held nor waiting. So
memory is bounded by what is open, a few thousand micro-batches of some 200 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from trainer.errors import LedgerError
from trainer.pipeline.ledger import records
from trainer.pipeline.ledger.messages import (
    MAX_WORKER_COUNTS,
    Account,
    LaneProgress,
    LostCount,
    PerishedCount,
    Tally,
    WorkerCount,
)
from trainer.pipeline.ledger.records import LedgerSnapshot, Record, WorkerSeen, WorkerSnapshot
from trainer.pipeline.ledger.units import Intervals, LaneLeases, LaneSnapshot, LedgerSpec, Run, runs_of
from trainer.pipeline.protocol.work import MicroBatchId, StageCredit

_MOST_WAYS = 256
_MOST_UNANNOUNCED = 1024
_MOST_GAPS = 4096  # Runs of numbers kept of one worker; honest drivers' credits of it leave no gaps.
_MOST_DEPARTED = 4096
_OTHER = "other"  # The reason counted for losses once drivers have come up with `_MOST_WAYS` pairs of stage and reason.


@dataclass(slots=True)
class OpenLease:
    """A live lease."""

    driver: str
    open: set[MicroBatchId] = field(default_factory=set)
    bereaved: bool = False
    """A worker of the last stage has vanished since it was given, so what that one had applied cannot be asked for.
    Workers of other stages do not matter: they apply only what the last stage has applied before."""


@dataclass(slots=True)
class _Worker:
    """A worker that is assumed to be alive."""

    stage: str
    announced: bool = False
    """Whether it has announced itself. Others are named by drivers alone, who may invent them: when they go, that says
    nothing about leases, and nothing counts as perished with them."""
    shared_through: int = 0
    unshared: Intervals = field(default_factory=Intervals)
    """Numbers of the micro-batches that it acknowledged and is not known to have shared."""
    credited: int = 0
    """Micro-batches that drivers settled with it, each once: what it has contributed, by somebody else's word."""

    def acknowledge(self, number: int) -> int:
        """Notes a micro-batch that it has counted; returns by how much what it is not known to have shared grows."""
        before = len(self.unshared)
        if number > self.shared_through and self.unshared.num_runs < _MOST_GAPS:
            self.unshared.add(number)
        return len(self.unshared) - before

    def share(self, through: int) -> None:
        """Notes what outlives it."""
        if through > self.shared_through:
            self.shared_through = through
            self.unshared.drop_through(through)


class LedgerState:
    """The state of an account, with the shards of each lane; only `apply` changes it. Use `of`."""

    def __init__(self, snapshot: LedgerSnapshot, shards: Sequence[Sequence[int]]) -> None:
        layout = snapshot.spec.layout
        self.spec = snapshot.spec
        self.lanes = [
            LaneLeases(ids, layout.units_per_shard, lane) for ids, lane in zip(shards, snapshot.lanes, strict=True)
        ]
        self.leases = {
            lease.token: OpenLease(lease.driver, set(layout.micro_batches(*lease.open)), lease.bereaved)
            for lease in snapshot.leases
        }
        self.holder = {micro_batch: token for token, lease in self.leases.items() for micro_batch in lease.open}
        """The lease that each open micro-batch is in."""
        self.waiting = dict.fromkeys(layout.micro_batches(*snapshot.waiting))  # To be given again, the oldest first.
        self.workers, self._departed = _workers_of(snapshot.workers), _workers_of(snapshot.departed)
        # Departed: announced once and gone lately; drivers may only now report what these have counted.
        self._open_rows = sum(map(layout.rows_of, (*self.holder, *self.waiting)))
        (self._done, self._done_rows), (_, self._lost_rows) = snapshot.done, snapshot.lost
        self._lost_by = Counter({(stage, reason): count for stage, reason, count in snapshot.lost_by})
        self._perished_by = Counter(dict(snapshot.perished_by))
        self._trained_tokens, self._reissued = snapshot.trained_tokens, snapshot.reissued
        self._noted = snapshot.noted

    @classmethod
    def of(cls, lines: Iterable[Record], spec: LedgerSpec, shards: Sequence[Sequence[int]]) -> Self:
        """Returns what a journal adds up to, with the shards of each lane as the store is now.

        Raises LedgerError if it is of something else, or its records contradict each other.
        """
        iterator = iter(lines)
        first = next(iterator, None)
        if not isinstance(first, records.Opened | LedgerSnapshot):
            raise LedgerError(f"expected a journal that begins with what it is of, found {type(first).__name__}")
        for name in type(spec).model_fields:
            ours, theirs = getattr(spec, name), getattr(first.spec, name)
            if ours != theirs:
                raise LedgerError(
                    f"expected an account with {name} {ours}, as this run has, found {theirs}; take another state "
                    "folder or the run's own settings"
                )
        if isinstance(first, records.Opened):
            first = LedgerSnapshot(spec=first.spec, lanes=tuple(map(LaneSnapshot.new, first.shards)))
        _check_shards([lane.next_num_shards for lane in first.lanes], shards)
        state = cls(first, shards)
        for record in iterator:
            state.apply(record)
        return state

    def lane_of(self, shard: int) -> LaneLeases | None:
        """Returns the lane that has a shard."""
        return next((lane for lane in self.lanes if lane.has(shard)), None)

    def is_settled(self, micro_batch: MicroBatchId) -> bool:
        """Whether it is done or lost: it was given to a driver once, and is not open any more."""
        lane = self.lane_of(micro_batch.shard)
        is_open = micro_batch in self.holder or micro_batch in self.waiting
        return not is_open and lane is not None and lane.is_leased(self.spec.layout.unit_of(micro_batch))

    def num_held_by(self, driver: str) -> int:
        """Returns how many micro-batches a driver has."""
        return sum(len(lease.open) for lease in self.leases.values() if lease.driver == driver)

    def announced_workers(self) -> set[str]:
        """Returns the incarnations of workers that have announced themselves, and are not gone."""
        return {incarnation for incarnation, worker in self.workers.items() if worker.announced}

    def has_heard_of(self, credit: StageCredit) -> bool:
        """Whether the worker that a driver names has announced itself for that stage, now or not long ago."""
        worker = self._known(credit.incarnation)
        return worker is not None and worker.announced and worker.stage == credit.stage

    def has_news(self, seen: WorkerSeen) -> bool:
        """Whether what a worker announces changes anything."""
        worker, former = self.workers.get(seen.incarnation), self._known(seen.resumed)
        if worker is None or not worker.announced or seen.shared_through > worker.shared_through:
            return True
        return former is not None and former.stage == seen.stage and seen.resumed_through > former.shared_through

    @property
    def noted_version(self) -> int | None:
        """The stages' version when it was noted last; None: it never was."""
        return None if self._noted is None else self._noted[0]

    def highest_version(self, target_tokens: int) -> int | None:
        """Returns the highest version that stages can have if this account tells of all they were trained on.

        None: no version was ever noted. ``target_tokens`` is of an optimizer step.
        """
        leased = (self._done_rows + self._lost_rows + self._open_rows) * self.spec.layout.seq_len
        if self._noted is None:
            return None if leased else 0
        version, settled = self._noted
        return version + -(-(leased - settled) // target_tokens)

    def spoken_for_tokens(self) -> int:
        """Returns the tokens that were trained on, or that a driver has to train on."""
        layout = self.spec.layout
        waiting_rows = sum(map(layout.rows_of, self.waiting))
        return self._trained_tokens + (self._open_rows - waiting_rows) * layout.seq_len

    def draft(self) -> list[LaneLeases]:
        """Returns copies of the lanes, to try on what comes next."""
        units = self.spec.layout.units_per_shard
        return [LaneLeases(lane.shards, units, lane.snapshot()) for lane in self.lanes]

    def account(self) -> Account:
        """Returns what has become of the data so far."""
        seq_len, num_open = self.spec.layout.seq_len, len(self.holder) + len(self.waiting)
        lanes = []
        for spec, lane in zip(self.spec.lanes, self.lanes, strict=True):
            leased, units = lane.units_of_epoch
            lanes.append(
                LaneProgress(
                    source=spec.source, epoch=lane.epoch, shards=lane.num_shards, units_leased=leased, units=units
                )
            )
        return Account(
            micro_batches=_tally(self._done, self._lost_by.total(), num_open),
            tokens=_tally(self._done_rows * seq_len, self._lost_rows * seq_len, self._open_rows * seq_len),
            trained_tokens=self._trained_tokens,
            waiting=len(self.waiting),
            reissued=self._reissued,
            leases=len(self.leases),
            lost=tuple(
                LostCount(stage=stage, reason=reason, micro_batches=count)
                for (stage, reason), count in sorted(self._lost_by.items())
            ),
            perished=tuple(
                PerishedCount(stage=stage, micro_batches=count)
                for stage, count in sorted(self._perished_by.items())
                if count
            ),
            lanes=tuple(lanes),
        )

    def worker_counts(self) -> tuple[WorkerCount, ...]:
        """Returns how many micro-batches drivers settled with each worker, those lately gone included."""
        known = [*self.workers.items(), *self._departed.items()]
        counts = (
            WorkerCount(stage=worker.stage, incarnation=incarnation, micro_batches=worker.credited)
            for incarnation, worker in known
            if worker.credited
        )
        return tuple(sorted(counts, key=lambda it: -it.micro_batches)[:MAX_WORKER_COUNTS])

    def snapshot(self) -> LedgerSnapshot:
        """Returns all of it as one record."""
        layout = self.spec.layout
        return LedgerSnapshot(
            spec=self.spec,
            lanes=tuple(lane.snapshot() for lane in self.lanes),
            leases=tuple(
                records.LeaseSnapshot(
                    token=token, driver=lease.driver, bereaved=lease.bereaved, open=runs_of(lease.open, layout)
                )
                for token, lease in self.leases.items()
            ),
            waiting=runs_of(self.waiting, layout),
            workers=_worker_snapshots(self.workers),
            departed=_worker_snapshots(self._departed),
            done=(self._done, self._done_rows),
            lost=(self._lost_by.total(), self._lost_rows),
            lost_by=tuple((stage, reason, count) for (stage, reason), count in sorted(self._lost_by.items())),
            perished_by=tuple(sorted(self._perished_by.items())),
            trained_tokens=self._trained_tokens,
            reissued=self._reissued,
            noted=self._noted,
        )

    # -- applying records ----------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Adds a record; raises LedgerError if it contradicts those before it."""
        match record:
            case records.Granted():
                self._grant(record)
            case records.Settled():
                self._settle(record)
            case records.Resolved():
                self._resolve(record)
            case records.Workers():
                self._note_workers(record)
            case records.Grown():
                _check_shards(record.shards, [lane.shards for lane in self.lanes])
                for lane, num_shards in zip(self.lanes, record.shards, strict=True):
                    lane.grow(num_shards)
            case _:
                raise LedgerError(f"expected one beginning of a journal, found a second one ({record.kind})")

    def _grant(self, record: records.Granted) -> None:
        lease = self.leases.setdefault(record.token, OpenLease(record.driver))
        for micro_batch in self.spec.layout.micro_batches(*record.runs):
            if micro_batch in self.holder:
                raise LedgerError(f"expected a micro-batch that nobody holds, found {micro_batch}")
            if micro_batch in self.waiting:
                del self.waiting[micro_batch]
                self._reissued += 1
            else:
                self._lease_anew(micro_batch)
            lease.open.add(micro_batch)
            self.holder[micro_batch] = record.token

    def _lease_anew(self, micro_batch: MicroBatchId) -> None:
        layout, lane = self.spec.layout, self.lane_of(micro_batch.shard)
        if lane is None:
            raise LedgerError(f"expected a shard of this account, found {micro_batch}")
        unit = layout.unit_of(micro_batch)
        if micro_batch.row % layout.unit_rows == 0:
            lane.lease(unit)
        elif not lane.is_leased(unit):
            raise LedgerError(f"expected the beginning of a unit, found {micro_batch}")
        self._open_rows += layout.rows_of(micro_batch)

    def _settle(self, record: records.Settled) -> None:
        for settlement in record.settlements:
            micro_batch = MicroBatchId.parse(settlement.micro_batch)
            if settlement.outcome == "done":
                self._count_done(micro_batch, record.token, settlement.num_tokens)
            else:
                self._count_lost(micro_batch, record.token, settlement.lost_at or "", settlement.reason or "")
            for credit in settlement.credits:
                self._credit(credit)
        self._return(record.handed_back, record.token)

    def _resolve(self, record: records.Resolved) -> None:
        layout = self.spec.layout
        for micro_batch in layout.micro_batches(*record.done):
            self._count_done(micro_batch, record.token, layout.rows_of(micro_batch) * layout.seq_len)
        for lost in record.lost:
            for micro_batch in layout.micro_batches(*lost.runs):
                self._count_lost(micro_batch, record.token, lost.stage, lost.reason)
        self._return(record.returned, record.token)

    def _count_done(self, micro_batch: MicroBatchId, token: str, num_tokens: int) -> None:
        rows = self._close(micro_batch, token)
        self._done += 1
        self._done_rows += rows
        self._trained_tokens += num_tokens

    def _count_lost(self, micro_batch: MicroBatchId, token: str, stage: str, reason: str) -> None:
        self._lost_rows += self._close(micro_batch, token)
        is_new = (stage, reason) not in self._lost_by
        self._lost_by[stage, _OTHER if is_new and len(self._lost_by) >= _MOST_WAYS else reason] += 1

    def _close(self, micro_batch: MicroBatchId, token: str) -> int:
        """Takes a settled micro-batch out of its lease; returns how many rows it has."""
        self._drop(micro_batch, token)
        rows = self.spec.layout.rows_of(micro_batch)
        self._open_rows -= rows
        return rows

    def _return(self, runs: Iterable[Run], token: str) -> None:
        """Has micro-batches of a lease wait for another driver; forgets the lease if nothing of it is left open."""
        for micro_batch in self.spec.layout.micro_batches(*runs):
            self._drop(micro_batch, token)
            self.waiting[micro_batch] = None
        lease = self.leases.get(token)
        if lease is not None and not lease.open:
            del self.leases[token]

    def _drop(self, micro_batch: MicroBatchId, token: str) -> None:
        if self.holder.get(micro_batch) != token:
            raise LedgerError(f"expected a micro-batch that is open in lease {token[:8]}, found {micro_batch}")
        del self.holder[micro_batch]
        self.leases[token].open.discard(micro_batch)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _note_workers(self, record: records.Workers) -> None:
        if record.version is not None:
            self._noted = record.version, (self._done_rows + self._lost_rows) * self.spec.layout.seq_len
        for seen in record.seen:
            worker = self.workers.get(seen.incarnation) or self._back(seen.incarnation) or _Worker(seen.stage)
            self.workers[seen.incarnation] = worker
            worker.announced, worker.stage = True, seen.stage
            worker.share(seen.shared_through)
            self._take_back(seen)
        for incarnation in record.gone:
            gone = self.workers.pop(incarnation, None)
            if gone is None or not gone.announced:
                continue
            if len(gone.unshared):
                self._perished_by[gone.stage] += len(gone.unshared)
            self._departed[incarnation] = gone
            if len(self._departed) > _MOST_DEPARTED:
                del self._departed[next(iter(self._departed))]
            if gone.stage == self.spec.stages[-1]:  # It counts before all others: what no tail has, nobody has.
                for lease in self.leases.values():
                    lease.bereaved = True

    def _known(self, incarnation: str | None) -> _Worker | None:
        return None if incarnation is None else self.workers.get(incarnation) or self._departed.get(incarnation)

    def _take_back(self, seen: WorkerSeen) -> None:
        """Takes back what counted as perished with a former worker and is in the state that this one resumes from."""
        former = self._known(seen.resumed)
        if former is None or former.stage != seen.stage:
            return
        before = len(former.unshared)
        former.share(seen.resumed_through)
        if seen.resumed in self._departed:
            self._perished_by[former.stage] -= before - len(former.unshared)

    def _back(self, incarnation: str) -> _Worker | None:
        """Returns a worker that was silent for so long that it counted as gone; takes back what had perished."""
        worker = self._departed.pop(incarnation, None)
        if worker is not None:
            self._perished_by[worker.stage] -= len(worker.unshared)
        return worker

    def _credit(self, credit: StageCredit) -> None:
        """Notes what a worker has counted, by a driver's word; what it has shared it says itself (`WorkerSeen`)."""
        worker = self.workers.get(credit.incarnation)
        departed = self._departed.get(credit.incarnation) if worker is None else None
        if departed is not None:
            departed.credited += 1
            self._perished_by[departed.stage] += departed.acknowledge(credit.applied_number)
            return
        if worker is None:
            if sum(not each.announced for each in self.workers.values()) >= _MOST_UNANNOUNCED:
                return
            worker = self.workers[credit.incarnation] = _Worker(credit.stage)
        worker.credited += 1
        worker.acknowledge(credit.applied_number)


def _worker_snapshots(workers: Mapping[str, _Worker]) -> tuple[WorkerSnapshot, ...]:
    return tuple(
        WorkerSnapshot(
            stage=worker.stage,
            incarnation=incarnation,
            announced=worker.announced,
            shared_through=worker.shared_through,
            unshared=tuple(worker.unshared),
            credited=worker.credited,
        )
        for incarnation, worker in workers.items()
    )


def _workers_of(snapshots: Iterable[WorkerSnapshot]) -> dict[str, _Worker]:
    return {
        it.incarnation: _Worker(it.stage, it.announced, it.shared_through, Intervals(it.unshared), it.credited)
        for it in snapshots
    }


def _tally(done: int, lost: int, num_open: int) -> Tally:
    return Tally(leased=done + lost + num_open, done=done, lost=lost, open=num_open)


def _check_shards(expected: Sequence[int], shards: Sequence[Sequence[int]]) -> None:
    found = [len(each) for each in shards]
    if len(found) != len(expected) or any(map(int.__lt__, found, expected)):
        raise LedgerError(
            f"expected a store with at least {list(expected)} shards a lane, as the account has, found {found}"
        )
