"""Decides: who is given what, what is believed of what drivers say, what becomes of leases that ran out.

Every change is a record, written before it is spoken of. Time comes as an argument (seconds on CLOCK_BOOTTIME) and is
in no record; the ledger itself waits for nothing and calls nobody but ``write``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.errors import LedgerError, RefusedError, TrainerUsageError
from trainer.pipeline.ledger.account import Account
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.ledger.inquiry import AppliedReport
from trainer.pipeline.ledger.lane_book import LaneBook
from trainer.pipeline.ledger.ledger_state import LeaseBook, LedgerState
from trainer.pipeline.ledger.records import Granted, Grown, LostRuns, Record, Resolved, Settled, Workers, WorkerSeen
from trainer.pipeline.ledger.units import Run, Unit, runs_of
from trainer.pipeline.protocol.micro_batch import MicroBatchId
from trainer.pipeline.protocol.work import Settlement

__all__ = ["Grant", "Ledger", "Receipt"]

_MOST_RETURNED = 512
"""Micro-batches of a lease of what came back: each may be a run of its own, 60 bytes of an answer's 64 KiB."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a driver is given."""

    runs: tuple[Run, ...]
    finished: bool = False
    """Nothing is left, and nothing will be."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of what a driver said."""

    accepted: int
    repeated: int = 0
    """Were settled before; nothing was counted twice."""
    stale: tuple[MicroBatchId, ...] = ()
    """Not this lease's any more; what was said of them does not count."""
    unheard: tuple[MicroBatchId, ...] = ()
    """Done by workers that nobody else has heard of; open still."""


class Ledger:
    """The account, and the rules by which it changes.

    Args:
        books: its state.
        config: how long leases are, and how much is leased.
        write: takes every record before it is spoken of; what it raises ends the account's life in this process.
        now_s: leases that are live already begin anew here.
        max_tokens: to be trained on in all, those of the journal included; 0: no bound.
    """

    def __init__(
        self,
        books: LedgerState,
        config: LedgerConfig,
        write: Callable[[Record], None],
        now_s: float,
        *,
        max_tokens: int = 0,
    ) -> None:
        self._books = books
        self._config = config
        self._write = write
        self._max_tokens = max_tokens
        self._ends_s = dict.fromkeys(books.leases, now_s + config.lease_s)
        self._looked_into: set[str] = set()
        self._seen_s = dict.fromkeys(books.workers, now_s)
        self._unheard_s: dict[tuple[str, MicroBatchId], float] = {}
        """By lease and micro-batch: since when its driver says that workers have done it whom nobody has heard of."""
        self._rests_until_s = dict.fromkeys(books.waiting, now_s + config.reissue_after_s)
        self.leases_nothing = False
        """Set until it is known that this is the account of what the workers were trained on."""
        self.failure: Exception | None = None
        """Why the account cannot be written any more; the process has to be started again."""

    @property
    def books(self) -> LedgerState:
        """The state, to look at."""
        return self._books

    def account(self) -> Account:
        """What has become of the data so far."""
        return self._books.account()

    def lease(self, driver: str, token: str, preferred: Sequence[int], num_units: int, now_s: float) -> Grant:
        """Gives a driver rows: first what came back from others, then units of shards it prefers, then of any.

        Args:
            driver: who asks.
            token: drawn by it; the same again gives what is left of the same lease, and lets it begin anew.
            preferred: shards, the first most.
            num_units: how many units, or as many micro-batches as these have.
            now_s: the time.

        Raises:
            RefusedError: the token is another driver's, or the driver holds enough.
            LedgerError: the account cannot be written.
        """
        known = self._lease_of(driver, token)
        if known is not None and token not in self._looked_into:
            self._ends_s[token] = now_s + self._config.lease_s
            return Grant(runs_of(known.open, self._books.spec.layout))
        if known is not None:
            raise RefusedError("lease-over", f"lease {token[:8]} has run out; draw another token")
        if self._left_tokens() <= 0:
            return Grant((), finished=not self._books.leases)
        num_units = min(num_units, self._units_for(driver))
        if not num_units:
            raise RefusedError(
                "enough",
                f"expected a driver that holds fewer than {self._config.max_open} micro-batches and less than its "
                f"share of what is left, found {self._books.num_held_by(driver)}",
            )
        runs = self._returned_runs(preferred, num_units, now_s) or self._new_runs(preferred, num_units)
        if not runs:
            return Grant((), finished=not self._books.leases and not self._books.waiting)
        if self.leases_nothing:
            return Grant(())
        given, surplus = self._cut(runs)
        self._change(Granted(token=token, driver=driver, runs=runs))
        self._ends_s[token] = now_s + self._config.lease_s
        if surplus:
            self._change(Settled(token=token, handed_back=surplus))
        return Grant(given)

    def renew(self, driver: str, tokens: Iterable[str], now_s: float) -> tuple[str, ...]:
        """Lets leases last longer; those that are live and this driver's, the others being over."""
        live = []
        for token in tokens:
            lease = self._books.leases.get(token)
            if lease is not None and lease.driver == driver and token not in self._looked_into:
                self._ends_s[token] = now_s + self._config.lease_s
                live.append(token)
        return tuple(live)

    def settle(
        self,
        driver: str,
        token: str,
        settlements: Sequence[Settlement],
        handed_back: Sequence[MicroBatchId] = (),
        *,
        checked_s: float | None = None,
    ) -> Receipt:
        """Takes a driver's word on micro-batches of its lease; again is as once.

        Args:
            driver: who says so.
            token: of the lease.
            settlements: what became of micro-batches.
            handed_back: those not begun.
            checked_s: the time, where only workers are believed to have done something that have announced themselves
                for that stage; what names others stays open (see `unheard`). None: drivers are believed.

        Raises:
            RefusedError: the lease is another driver's, or a settlement makes no sense; nothing is counted.
            LedgerError: the account cannot be written.
        """
        self._lease_of(driver, token)
        for settlement in settlements:
            self._check(settlement)
        said = {MicroBatchId.parse(each.micro_batch): each for each in settlements}
        back = dict.fromkeys(each for each in handed_back if each not in said)
        for each in back:
            self._check_micro_batch(each)
        held = [each for each in (*said, *back) if self._books.holder(each) == token]
        others = [each for each in (*said, *back) if self._books.holder(each) != token]
        unheard = () if checked_s is None else tuple(each for each in held if self._is_unheard(said.get(each)))
        for each in unheard:
            self._unheard_s.setdefault((token, each), checked_s or 0.0)
        mine = set(held).difference(unheard)
        stale = tuple(each for each in others if not self._is_settled(each))
        if mine:
            self._change(
                Settled(
                    token=token,
                    settlements=tuple(settlement for each, settlement in said.items() if each in mine),
                    handed_back=runs_of((each for each in back if each in mine), self._books.spec.layout),
                )
            )
            self._forget_ended()
        return Receipt(len(mine), len(others) - len(stale), stale, unheard)

    def release(self, driver: str, token: str, now_s: float) -> None:
        """Ends a lease of a driver that says it sends nothing of it any more.

        Raises:
            RefusedError: it is another driver's.
        """
        if self._lease_of(driver, token) is not None:
            self._ends_s[token] = min(self._ends_s[token], now_s)

    def release_all(self, driver: str, now_s: float) -> None:
        """Ends all leases of a driver whose process is known to be gone, as a keeper's own of its life before."""
        for token, lease in self._books.leases.items():
            if lease.driver == driver:
                self._ends_s[token] = min(self._ends_s[token], now_s)

    def due(self, now_s: float) -> tuple[str, ...]:
        """Leases that have run out long enough to be looked into; from now on they cannot be renewed."""
        margin_s = self._config.lease_margin_s
        over = tuple(token for token, end_s in self._ends_s.items() if end_s + margin_s <= now_s)
        self._looked_into.update(over)
        return over

    def unheard(self, now_s: float) -> dict[str, tuple[MicroBatchId, ...]]:
        """Open micro-batches that workers have done, as drivers say, who had long enough to be heard of and were not.

        Announcements may come later than what is said of a worker, but not later than a worker is missed.

        Returns:
            By lease.
        """
        patience_s = max(self._config.worker_gone_s, self._config.lease_s)
        holder = self._books.holder
        self._unheard_s = {which: since_s for which, since_s in self._unheard_s.items() if holder(which[1]) == which[0]}
        found: dict[str, tuple[MicroBatchId, ...]] = {}
        for (token, each), since_s in self._unheard_s.items():
            if since_s + patience_s <= now_s:
                found[token] = (*found.get(token, ()), each)
        return found

    def is_complete(self, token: str, report: AppliedReport) -> bool:
        """Whether whoever may have counted something of a lease has said so."""
        lease = self._books.leases.get(token)
        alive = self._books.announced_workers() <= report.answered and not report.silent
        return lease is not None and alive and not lease.bereaved

    def may_become_complete(self, token: str) -> bool:
        """Whether asking again may tell more."""
        lease = self._books.leases.get(token)
        return lease is not None and not lease.bereaved

    def resolve(
        self, token: str, report: AppliedReport, now_s: float, some: Collection[MicroBatchId] | None = None
    ) -> Resolved | None:
        """Ends a lease, or some of it, by what workers say.

        Counted in all stages is done, in some is lost, in none waits for a driver.
        Where not all could be asked, what is counted in none is lost as ``unclear``: who is silent may have it.

        Args:
            token: of the lease.
            report: what the workers say.
            now_s: the time; what is in no stage is given again `reissue_after_s` from then.
            some: what of it to decide about (see `unheard`); None: all.

        Returns:
            What was decided; None: that has ended by itself.

        Raises:
            LedgerError: the account cannot be written.
        """
        lease = self._books.leases.get(token)
        asked = sorted(lease.open if some is None else lease.open.intersection(some)) if lease is not None else []
        if not asked:
            self._forget_ended()
            return None
        record = self._resolution(token, asked, report, "driver-lost" if some is None else "unheard")
        self._change(record)
        self._forget_ended()
        again_s = now_s + self._config.reissue_after_s
        for run in record.returned:
            self._rests_until_s.update(dict.fromkeys(self._books.spec.layout.micro_batches(run), again_s))
        return record

    def note_workers(self, seen: Iterable[WorkerSeen], now_s: float, version: int | None = None) -> None:
        """Takes note of all workers that are announced now; those that are not, for long enough, are gone.

        Args:
            seen: they.
            now_s: the time.
            version: the stages'; None: not all of them are heard of.

        Raises:
            LedgerError: the account cannot be written.
        """
        known = self._books.workers
        fresh = []
        for worker in seen:
            self._seen_s[worker.incarnation] = now_s
            if self._books.has_news(worker):
                fresh.append(worker)
        for incarnation in known:
            self._seen_s.setdefault(incarnation, now_s)
        gone = tuple(each for each in known if self._seen_s[each] + self._config.worker_gone_s <= now_s)
        if version == self._books.noted_version or self.leases_nothing:
            version = None
        if fresh or gone or version is not None:
            self._change(Workers(seen=tuple(fresh), gone=gone, version=version))
        self._seen_s = {each: when_s for each, when_s in self._seen_s.items() if each in known}

    def grow(self, shards: Sequence[Sequence[int]]) -> None:
        """Takes note of a store that has more shards: read from each lane's next epoch on.

        Args:
            shards: of each lane, ascending; all there are.

        Raises:
            LedgerError: it is not the same store, grown; or the account cannot be written.
        """
        lanes = self._books.lanes
        if len(shards) != len(lanes) or any(map(_shrinks, self._books.shards, shards)):
            raise LedgerError("expected a store that has grown at its end, found one that has lost or changed shards")
        counts = [len(ids) for ids in shards]
        if counts == [lane.next_num_shards for lane in lanes]:
            return
        self._books.know(shards)
        self._change(Grown(shards=tuple(counts)))

    def _resolution(self, token: str, asked: Sequence[MicroBatchId], report: AppliedReport, in_some: str) -> Resolved:
        """What becomes of micro-batches; those that only some stages have are lost for the reason ``in_some``."""
        stages, layout = self._books.spec.stages, self._books.spec.layout
        complete = self.is_complete(token, report)
        done, returned, lost = [], [], dict[tuple[str, str], list[MicroBatchId]]()
        for micro_batch in asked:
            missing = [stage for stage in stages if str(micro_batch) not in report.applied.get(stage, ())]
            if not missing:
                done.append(micro_batch)
            elif len(missing) < len(stages):
                lost.setdefault((missing[0], in_some), []).append(micro_batch)
            elif complete:
                returned.append(micro_batch)
            else:
                lost.setdefault((missing[0], "unclear"), []).append(micro_batch)
        return Resolved(
            token=token,
            done=runs_of(done, layout),
            lost=tuple(
                LostRuns(stage=stage, reason=reason, runs=runs_of(each, layout))
                for (stage, reason), each in lost.items()
            ),
            returned=runs_of(returned, layout),
        )

    def _units_for(self, driver: str) -> int:
        """How many more a driver may have: `max_open`, and while an end is in sight its share of half of what is left.

        So drivers come to their ends together, however fast each is, and hold what they need ahead until then.
        """
        layout, held = self._books.spec.layout, self._books.num_held_by(driver)
        room = -(-(self._config.max_open - held) // layout.micro_batches_per_unit)
        drivers = {driver, *(lease.driver for lease in self._books.leases.values())}
        left = self._left_micro_batches()
        if left == math.inf:
            return max(0, room)
        share = (left + self._books.num_open) / (2 * len(drivers))
        least = self._config.lease_units * layout.micro_batches_per_unit
        return max(0, min(room, math.ceil((max(2 * least, share) - held) / layout.micro_batches_per_unit)))

    def _left_micro_batches(self) -> float:
        """Those that may still be given to drivers; infinity: there is no end."""
        layout, epochs = self._books.spec.layout, self._config.epochs
        by_tokens = self._left_tokens() / (layout.micro_batch_rows * layout.seq_len)
        if not epochs:
            return by_tokens
        units = 0
        for lane in self._books.lanes:
            leased, in_all = lane.units_of_epoch
            units += in_all - leased + (epochs - 1 - lane.epoch) * lane.next_num_shards * layout.units_per_shard
        return min(by_tokens, units * layout.micro_batches_per_unit + len(self._books.waiting))

    def _left_tokens(self) -> float:
        """How many may still be given to drivers; what is lost is made up for."""
        return self._max_tokens - self._books.spoken_for_tokens() if self._max_tokens else math.inf

    def _cut(self, runs: tuple[Run, ...]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """Of some rows, those that may be given, and the others, which wait: shards are begun by whole units."""
        layout, left = self._books.spec.layout, self._left_tokens()
        given: list[MicroBatchId] = []
        surplus: list[MicroBatchId] = []
        for micro_batch in (each for run in runs for each in layout.micro_batches(run)):
            (given if left > 0 else surplus).append(micro_batch)
            left -= layout.rows_of(micro_batch) * layout.seq_len
        return (runs_of(given, layout), runs_of(surplus, layout)) if surplus else (runs, ())

    def _returned_runs(self, preferred: Sequence[int], num_units: int, now_s: float) -> tuple[Run, ...]:
        """Of what came back, the oldest first, of preferred shards before others."""
        waiting, layout = self._books.waiting, self._books.spec.layout
        self._rests_until_s = {
            each: until_s for each, until_s in self._rests_until_s.items() if each in waiting and until_s > now_s
        }
        wanted = frozenset(preferred)
        rested = [each for each in waiting if each not in self._rests_until_s]
        ordered = sorted(rested, key=lambda each: each.shard not in wanted)  # stable: the oldest first
        return runs_of(ordered[: min(num_units * layout.micro_batches_per_unit, _MOST_RETURNED)], layout)

    def _new_runs(self, preferred: Sequence[int], num_units: int) -> tuple[Run, ...]:
        """Units that nobody was given yet."""
        books = self._books.draft()
        units: list[Unit] = []
        while len(units) < num_units:
            lane = min(
                (each for each in zip(books, self._books.spec.lanes, strict=True) if self._has_more(each[0])),
                key=lambda each: each[0].units_leased / each[1].weight,
                default=None,
            )
            unit = None if lane is None else _next_of(lane[0], preferred)
            if lane is None or unit is None:
                break
            lane[0].lease(unit)
            units.append(unit)
        return tuple(map(self._books.spec.layout.run_of, units))

    def _has_more(self, lane: LaneBook) -> bool:
        return not lane.is_through or not self._config.epochs or lane.epoch + 1 < self._config.epochs

    def _lease_of(self, driver: str, token: str) -> LeaseBook | None:
        """A live lease; None: there is none of that token.

        Raises:
            RefusedError: it is another driver's.
        """
        lease = self._books.leases.get(token)
        if lease is not None and lease.driver != driver:
            raise RefusedError("not-yours", f"lease {token[:8]} is another driver's")
        return lease

    def _is_unheard(self, settlement: Settlement | None) -> bool:
        if settlement is None or settlement.outcome != "done":
            return False
        return not all(map(self._books.has_heard_of, settlement.credits))

    def _is_settled(self, micro_batch: MicroBatchId) -> bool:
        open_now = self._books.holder(micro_batch) is not None or micro_batch in self._books.waiting
        return not open_now and self._books.is_leased(micro_batch)

    def _check(self, settlement: Settlement) -> None:
        """Raises RefusedError if it makes no sense."""
        rows = self._check_micro_batch(MicroBatchId.parse(settlement.micro_batch))
        stages = [credit.stage for credit in settlement.credits]
        text = ""
        if len(set(stages)) != len(stages) or not set(stages) <= set(self._books.spec.stages):
            text = f"credits of stages of this run, each once, found {stages}"
        elif settlement.num_tokens > rows * self._books.spec.layout.seq_len:
            text = f"at most {rows * self._books.spec.layout.seq_len} tokens, found {settlement.num_tokens}"
        elif settlement.outcome == "done" and (len(stages) < len(self._books.spec.stages) or settlement.lost_at):
            text = f"all stages to have counted what is done, found {stages}"
        elif settlement.outcome == "lost" and (
            settlement.reason is None or settlement.lost_at not in self._books.spec.stages
        ):
            text = f"a reason and a stage of this run, found {settlement.reason} and {settlement.lost_at}"
        if text:
            raise RefusedError("malformed", f"{settlement.micro_batch}: expected {text}")

    def _check_micro_batch(self, micro_batch: MicroBatchId) -> int:
        """How many rows it has; raises RefusedError if there is none of that name."""
        try:
            rows = self._books.spec.layout.rows_of(micro_batch)
        except TrainerUsageError as error:
            raise RefusedError("malformed", str(error)) from None
        if self._books.lane_of(micro_batch.shard) is None:
            raise RefusedError("malformed", f"expected a shard of this run, found {micro_batch}")
        return rows

    def _forget_ended(self) -> None:
        live = self._books.leases
        self._ends_s = {token: end_s for token, end_s in self._ends_s.items() if token in live}
        self._looked_into &= live.keys()

    def _change(self, record: Record) -> None:
        """Writes a record, then counts it."""
        if self.failure is not None:
            raise LedgerError("expected an account that can be written, found that writing has failed; start it again")
        try:
            self._write(record)
            self._books.apply(record)
        except Exception as error:
            self.failure = error
            raise


def _next_of(lane: LaneBook, preferred: Sequence[int]) -> Unit | None:
    return lane.first_of_next_epoch(preferred) if lane.is_through else lane.next_unit(preferred)


def _shrinks(before: Sequence[int], after: Collection[int]) -> bool:
    return len(after) < len(before) or list(after)[: len(before)] != list(before)
