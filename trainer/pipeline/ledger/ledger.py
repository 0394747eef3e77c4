"""Decides what each driver is given, what is believed of drivers' reports, and what becomes of leases that ran out.

Every change is a record, on disk before any driver is told of it. Time is an argument (seconds on CLOCK_BOOTTIME) and
in no record; the ledger waits for nothing and calls nothing but ``write``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass

from trainer.errors import LedgerError, RefusedError, TrainerUsageError
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.ledger.ledger_state import LedgerState, OpenLease
from trainer.pipeline.ledger.messages import Account, LeaseAnswer, SettleAnswer
from trainer.pipeline.ledger.records import Granted, Grown, LostRuns, Record, Resolved, Settled, Workers, WorkerSeen
from trainer.pipeline.ledger.units import Run, Unit, runs_of
from trainer.pipeline.protocol.work import MicroBatchId, MicroBatchKey, Settlement

_MOST_RETURNED = 512
"""Micro-batches of a lease of returned ones: each may be a run of its own, 60 bytes of an answer's 64 KiB."""


@dataclass(frozen=True, slots=True)
class AppliedReport:
    """What the workers answered about micro-batches of a lease."""

    applied: Mapping[str, frozenset[MicroBatchKey]]  # By stage: counted by at least one of its workers.
    answered: frozenset[str]  # Incarnations of the workers that answered for all that was asked.
    silent: int = 0


@dataclass(eq=False, repr=False)
class Ledger:
    """The account, and the rules by which it changes; what changes it raises LedgerError if that cannot be written.

    Args:
        state: what the journal adds up to; to be read only.
        config: its options.
        write: writes each record before a driver is told of it; an exception ends the account's life in this process.
        now_s: live leases begin anew at this time.
        max_tokens: to be trained on in all, those of the journal included; 0: no bound.
    """

    state: LedgerState
    config: LedgerConfig
    write: Callable[[Record], None]
    now_s: InitVar[float]
    max_tokens: int = 0

    def __post_init__(self, now_s: float) -> None:
        state, config = self.state, self.config
        self._layout = state.spec.layout
        self._ends_s = dict.fromkeys(state.leases, now_s + config.lease_s)
        self._due: set[str] = set()  # Leases that ran out and are being resolved.
        self._seen_s = dict.fromkeys(state.workers, now_s)
        self._unheard_s: dict[tuple[str, MicroBatchId], float] = {}
        """By lease and micro-batch: since when its driver says that unknown workers have done it."""
        self._rests_until_s = dict.fromkeys(state.waiting, now_s + config.reissue_after_s)
        self.leases_nothing = False
        """Set until it is known that this is the account of what the workers were trained on."""
        self.failure: Exception | None = None
        """Why the account cannot be written any more; the process has to be restarted."""

    def account(self) -> Account:
        """Returns what has become of the data so far."""
        return self.state.account()

    def lease(self, driver: str, token: str, preferred: Sequence[int], num_units: int, now_s: float) -> LeaseAnswer:
        """Gives a driver rows: first what others returned, then units of shards it prefers, then of any.

        A repeated token gives what is left of the same lease, and lets it begin anew. Raises RefusedError if it is
        another driver's, or the driver holds enough.
        """
        known = self._lease_of(driver, token)
        if known is not None and token not in self._due:
            self._ends_s[token] = now_s + self.config.lease_s
            return self._leased(runs_of(known.open, self._layout))
        if known is not None:
            raise RefusedError("lease-over", f"lease {token[:8]} has run out; draw another token")
        if self._left_tokens() <= 0:
            return self._leased((), finished=not self.state.leases)
        num_units = min(num_units, self._units_for(driver))
        if not num_units:
            raise RefusedError(
                "enough",
                f"expected a driver that holds fewer than {self.config.max_open} micro-batches and less than its "
                f"share of what is left, found {self.state.num_held_by(driver)}",
            )
        runs = self._returned_runs(preferred, num_units, now_s) or self._new_runs(preferred, num_units)
        if not runs:
            return self._leased((), finished=not self.state.leases and not self.state.waiting)
        if self.leases_nothing:
            return self._leased(())
        given, surplus = self._cut(runs)
        self._change(Granted(token=token, driver=driver, runs=runs))
        self._due.discard(token)
        self._ends_s[token] = now_s + self.config.lease_s
        if surplus:
            self._change(Settled(token=token, handed_back=surplus))
        return self._leased(given)

    def renew(self, driver: str, tokens: Iterable[str], now_s: float) -> tuple[str, ...]:
        """Extends leases; returns those that are live and this driver's. The others are over."""
        leases = self.state.leases
        mine = (token for token in tokens if token in leases and leases[token].driver == driver)
        live = tuple(token for token in mine if token not in self._due)
        self._ends_s.update(dict.fromkeys(live, now_s + self.config.lease_s))
        return live

    def settle(
        self,
        driver: str,
        token: str,
        settlements: Sequence[Settlement],
        handed_back: Sequence[MicroBatchId] = (),
        *,
        checked_s: float | None = None,
    ) -> SettleAnswer:
        """Takes a driver's report on micro-batches of its lease; repeating it changes nothing.

        With the time in ``checked_s``, only workers that have announced themselves for the stage are believed to have
        done something; what names others stays open (see `unheard`). Without it, drivers are believed.
        Raises RefusedError if the lease is another driver's, or a settlement makes no sense; nothing is counted then.
        """
        self._lease_of(driver, token)
        for settlement in settlements:
            self._check(settlement)
        said = {MicroBatchId.parse(each.micro_batch): each for each in settlements}
        back = dict.fromkeys(each for each in handed_back if each not in said)
        for each in back:
            self._check_micro_batch(each)
        held = [each for each in (*said, *back) if self.state.holder.get(each) == token]
        others = [each for each in (*said, *back) if self.state.holder.get(each) != token]
        unheard: list[MicroBatchId] = []
        if checked_s is not None:
            is_done = (each for each in held if each in said and said[each].outcome == "done")
            unheard = [each for each in is_done if not all(map(self.state.has_heard_of, said[each].credits))]
            for each in unheard:
                self._unheard_s.setdefault((token, each), checked_s)
        mine = set(held).difference(unheard)
        stale = tuple(str(each) for each in others if not self.state.is_settled(each))
        if mine:
            self._change(
                Settled(
                    token=token,
                    settlements=tuple(settlement for each, settlement in said.items() if each in mine),
                    handed_back=runs_of((each for each in back if each in mine), self._layout),
                )
            )
        return SettleAnswer(
            accepted=len(mine), repeated=len(others) - len(stale), stale=stale, unheard=tuple(map(str, unheard))
        )

    def release(self, driver: str, token: str, now_s: float) -> None:
        """Ends a lease of which its driver sends nothing any more; raises RefusedError if it is another driver's."""
        if self._lease_of(driver, token) is not None:
            self._ends_s[token] = min(self._ends_s[token], now_s)

    def release_all(self, driver: str, now_s: float) -> None:
        """Ends all leases of a driver whose process is known to be gone, as a restarted keeper's own."""
        for token, lease in self.state.leases.items():
            if lease.driver == driver:
                self.release(driver, token, now_s)

    def due(self, now_s: float) -> tuple[str, ...]:
        """Returns the leases that ran out long enough ago to be resolved; they cannot be renewed any more."""
        self._ends_s = {token: end_s for token, end_s in self._ends_s.items() if token in self.state.leases}
        over = tuple(token for token, end_s in self._ends_s.items() if end_s + self.config.lease_margin_s <= now_s)
        self._due = set(over)
        return over

    def unheard(self, now_s: float) -> dict[str, tuple[MicroBatchId, ...]]:
        """Returns, by lease, open micro-batches that unknown workers have done, as their driver has said for long.

        An announcement may come later than a driver's report of the worker, but not later than a worker is missed.
        """
        patience_s, holder = max(self.config.worker_gone_s, self.config.lease_s), self.state.holder
        self._unheard_s = {
            (token, each): since_s for (token, each), since_s in self._unheard_s.items() if holder.get(each) == token
        }
        found: dict[str, tuple[MicroBatchId, ...]] = {}
        for (token, each), since_s in self._unheard_s.items():
            if since_s + patience_s <= now_s:
                found[token] = (*found.get(token, ()), each)
        return found

    def is_complete(self, token: str, report: AppliedReport) -> bool:
        """Whether all workers that may have counted something of a lease have answered."""
        return self._can_be_known(token) and not report.silent and self.state.announced_workers() <= report.answered

    def may_learn_more(self, token: str, report: AppliedReport) -> bool:
        """Whether asking the workers again may complete a report."""
        return self._can_be_known(token) and not self.is_complete(token, report)

    def open_in(self, token: str, some: Collection[MicroBatchId] | None = None) -> list[MicroBatchId]:
        """Returns what is open of a lease, or of some of it, in order."""
        lease = self.state.leases.get(token)
        if lease is None:
            return []
        return sorted(lease.open if some is None else lease.open.intersection(some))

    def resolve(
        self, token: str, report: AppliedReport, now_s: float, some: Collection[MicroBatchId] | None = None
    ) -> Resolved | None:
        """Ends a lease, or some of it (see `unheard`), by what workers report; None: nothing of it is open any more.

        Counted in all stages is done, in some is lost, in none waits for a driver. Where the report is not complete,
        what is counted in none is lost as ``unclear``: a silent worker may have it.
        """
        asked = self.open_in(token, some)
        if not asked:
            return None
        stages, layout, complete = self.state.spec.stages, self._layout, self.is_complete(token, report)
        done, returned, lost = [], [], dict[tuple[str, str], list[MicroBatchId]]()
        for micro_batch in asked:
            missing = [stage for stage in stages if str(micro_batch) not in report.applied.get(stage, ())]
            if not missing:
                done.append(micro_batch)
            elif len(missing) < len(stages):
                lost.setdefault((missing[0], "driver-lost" if some is None else "unheard"), []).append(micro_batch)
            elif complete:
                returned.append(micro_batch)
            else:
                lost.setdefault((missing[0], "unclear"), []).append(micro_batch)
        record = Resolved(
            token=token,
            done=runs_of(done, layout),
            lost=tuple(
                LostRuns(stage=stage, reason=reason, runs=runs_of(each, layout))
                for (stage, reason), each in lost.items()
            ),
            returned=runs_of(returned, layout),
        )
        self._change(record)
        self._rests_until_s.update(dict.fromkeys(returned, now_s + self.config.reissue_after_s))
        return record

    def note_workers(self, seen: Iterable[WorkerSeen], now_s: float, version: int | None = None) -> None:
        """Notes all workers that are announced now, and the stages' version if all stages are heard of.

        A worker that is missing for `worker_gone_s` is gone: what only that worker had counts as perished, and leases
        that were live meanwhile are believed less.
        """
        known, workers = self.state.workers, tuple(seen)
        fresh = tuple(filter(self.state.has_news, workers))
        self._seen_s = dict.fromkeys(known, now_s) | self._seen_s
        self._seen_s.update(dict.fromkeys((worker.incarnation for worker in workers), now_s))
        gone = tuple(each for each in known if self._seen_s[each] + self.config.worker_gone_s <= now_s)
        if version == self.state.noted_version or self.leases_nothing:
            version = None
        if fresh or gone or version is not None:
            self._change(Workers(seen=fresh, gone=gone, version=version))
        self._seen_s = {each: when_s for each, when_s in self._seen_s.items() if each in known}

    def grow(self, shards: Sequence[Sequence[int]]) -> None:
        """Notes a store that has more shards, at its end: they are read from each lane's next epoch on."""
        lanes = self.state.lanes
        if len(shards) != len(lanes) or any(
            list(ids)[: len(lane.shards)] != list(lane.shards) for lane, ids in zip(lanes, shards, strict=True)
        ):
            raise LedgerError("expected a store that has grown at its end, found one that has lost or changed shards")
        counts = tuple(map(len, shards))
        if counts != tuple(lane.next_num_shards for lane in lanes):
            for lane, ids in zip(lanes, shards, strict=True):
                lane.shards = ids
            self._change(Grown(shards=counts))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _leased(self, runs: tuple[Run, ...], *, finished: bool = False) -> LeaseAnswer:
        return LeaseAnswer(runs=runs, lease_s=self.config.lease_s, finished=finished)

    def _can_be_known(self, token: str) -> bool:
        """Whether a lease is live, and all workers that may have counted something of it can be asked."""
        lease = self.state.leases.get(token)
        return lease is not None and not lease.bereaved

    def _units_for(self, driver: str) -> int:
        """Returns how many more units a driver may have: up to `max_open`, near an end its share of half of the rest.

        So drivers come to their ends together, however fast each is.
        """
        layout, held = self._layout, self.state.num_held_by(driver)
        room = -(-(self.config.max_open - held) // layout.micro_batches_per_unit)
        left = self._left_micro_batches()
        if left == math.inf:
            return max(0, room)
        drivers = {driver, *(lease.driver for lease in self.state.leases.values())}
        share = (left + len(self.state.holder)) / (2 * len(drivers))
        least = self.config.lease_units * layout.micro_batches_per_unit
        return max(0, min(room, math.ceil((max(2 * least, share) - held) / layout.micro_batches_per_unit)))

    def _left_micro_batches(self) -> float:
        """Returns how many may still be given to drivers; infinity: there is no end."""
        layout, epochs = self._layout, self.config.epochs
        by_tokens = self._left_tokens() / (layout.micro_batch_rows * layout.seq_len)
        if not epochs:
            return by_tokens
        units = 0
        for lane in self.state.lanes:
            leased, in_all = lane.units_of_epoch
            units += in_all - leased + (epochs - 1 - lane.epoch) * lane.next_num_shards * layout.units_per_shard
        return min(by_tokens, units * layout.micro_batches_per_unit + len(self.state.waiting))

    def _left_tokens(self) -> float:
        """Returns how many may still be given to drivers; what is lost is made up for."""
        return self.max_tokens - self.state.spoken_for_tokens() if self.max_tokens else math.inf

    def _cut(self, runs: tuple[Run, ...]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """Splits rows into those that may be given and a surplus, which waits: shards are begun by whole units."""
        layout, left = self._layout, self._left_tokens()
        given: list[MicroBatchId] = []
        surplus: list[MicroBatchId] = []
        for micro_batch in layout.micro_batches(*runs):
            (given if left > 0 else surplus).append(micro_batch)
            left -= layout.rows_of(micro_batch) * layout.seq_len
        return (runs_of(given, layout), runs_of(surplus, layout)) if surplus else (runs, ())

    def _returned_runs(self, preferred: Sequence[int], num_units: int, now_s: float) -> tuple[Run, ...]:
        """Returns some of what came back, preferred shards first, then the oldest first."""
        waiting, layout = self.state.waiting, self._layout
        self._rests_until_s = {
            each: until_s for each, until_s in self._rests_until_s.items() if each in waiting and until_s > now_s
        }
        wanted = frozenset(preferred)
        rested = [each for each in waiting if each not in self._rests_until_s]
        ordered = sorted(rested, key=lambda each: each.shard not in wanted)  # stable: the oldest first
        return runs_of(ordered[: min(num_units * layout.micro_batches_per_unit, _MOST_RETURNED)], layout)

    def _new_runs(self, preferred: Sequence[int], num_units: int) -> tuple[Run, ...]:
        """Returns units that no driver was given yet, of lanes by their weights."""
        lanes = list(zip(self.state.draft(), self.state.spec.lanes, strict=True))
        units: list[Unit] = []
        while len(units) < num_units:
            with_more = [
                (lane.units_leased / spec.weight, lane)
                for lane, spec in lanes
                if not lane.is_through or not self.config.epochs or lane.epoch + 1 < self.config.epochs
            ]
            if not with_more:
                break
            _, lane = min(with_more, key=lambda each: each[0])
            unit = lane.next_unit(preferred)
            if unit is None:
                break
            lane.lease(unit)
            units.append(unit)
        return tuple(map(self._layout.run_of, units))

    def _lease_of(self, driver: str, token: str) -> OpenLease | None:
        """Returns the live lease of a token, if any; raises RefusedError if it is another driver's."""
        lease = self.state.leases.get(token)
        if lease is not None and lease.driver != driver:
            raise RefusedError("not-yours", f"lease {token[:8]} is another driver's")
        return lease

    def _check(self, settlement: Settlement) -> None:
        tokens = self._check_micro_batch(MicroBatchId.parse(settlement.micro_batch)) * self._layout.seq_len
        expected = self.state.spec.stages
        stages = [credit.stage for credit in settlement.credits]
        text = ""
        if len(set(stages)) != len(stages) or not set(stages) <= set(expected):
            text = f"credits of stages of this run, each once, found {stages}"
        elif settlement.num_tokens > tokens:
            text = f"at most {tokens} tokens, found {settlement.num_tokens}"
        elif settlement.outcome == "done" and (len(stages) < len(expected) or settlement.lost_at):
            text = f"all stages to have counted what is done, found {stages}"
        elif settlement.outcome == "lost" and (settlement.reason is None or settlement.lost_at not in expected):
            text = f"a reason and a stage of this run, found {settlement.reason} and {settlement.lost_at}"
        if text:
            raise RefusedError("malformed", f"{settlement.micro_batch}: expected {text}")

    def _check_micro_batch(self, micro_batch: MicroBatchId) -> int:
        """Returns how many rows it has; raises RefusedError if there is none of that name."""
        try:
            rows = self._layout.rows_of(micro_batch)
        except TrainerUsageError as error:
            raise RefusedError("malformed", str(error)) from None
        if self.state.lane_of(micro_batch.shard) is None:
            raise RefusedError("malformed", f"expected a shard of this run, found {micro_batch}")
        return rows

    def _change(self, record: Record) -> None:
        if self.failure is not None:
            raise LedgerError("expected an account that can be written, found that writing has failed; start it again")
        try:
            self.write(record)
            self.state.apply(record)
        except Exception as error:
            self.failure = error
            raise
