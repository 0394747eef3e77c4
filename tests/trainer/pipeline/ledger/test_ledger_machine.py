"""Any interleaving of drivers, leases that run out, workers that vanish and keepers that come back adds up."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.ledger_cast import ALIVE, LAYOUT, SHARDS, STAGES, ListedLedger, done, lost, micro_batches, report
from trainer.errors import RefusedError
from trainer.pipeline.ledger import LedgerConfig
from trainer.pipeline.ledger.units import Intervals
from trainer.pipeline.protocol.work import MicroBatchId

CONFIG = LedgerConfig(
    lease_s=10, lease_margin_s=2, epochs=2, max_open=12, worker_gone_s=5, unit_rows=8, reissue_after_s=3
)
DRIVERS = ("one", "two")
ALL = {
    MicroBatchId(epoch, shard, row)
    for epoch in (0, 1)
    for shard in SHARDS
    for row in range(0, LAYOUT.num_windows, LAYOUT.micro_batch_rows)
}


class LedgerMachine(RuleBasedStateMachine):
    """The model: what each live lease holds, and what is settled; the ledger must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = ListedLedger(CONFIG)
        self.now_s = 0.0
        self.tokens = self.given = self.applied = 0
        self.held: dict[str, set[MicroBatchId]] = {}
        self.driver_of: dict[str, str] = {}
        self.ever, self.done, self.lost_ids = set[MicroBatchId](), set[MicroBatchId](), set[MicroBatchId]()
        self.lost: Counter[tuple[str, str]] = Counter()
        self.heard: set[str] = set()

    @property
    def ledger(self):
        return self.kept.ledger

    @rule(driver=st.sampled_from(DRIVERS), units=st.integers(1, 3), preferred=st.lists(st.sampled_from(SHARDS)))
    def lease(self, driver: str, units: int, preferred: list[int]) -> None:
        self.tokens += 1
        token = f"{self.tokens:032x}"
        try:
            leased = self.ledger.lease(driver, token, preferred, units, self.now_s)
        except RefusedError as error:
            assert error.reason == "enough"
            return
        given = micro_batches(leased.runs)
        assert len(given) == len(set(given))
        for each in given:
            assert not any(each in other for other in self.held.values())
            assert each not in self.done | self.lost_ids
        assert leased.finished <= (not self.held and self.done | self.lost_ids == ALL)
        if given:
            self.held[token], self.driver_of[token] = set(given), driver
            self.ever.update(given)
            self.given += len(given)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["done", "lost", "back", "again"]), checked=st.booleans())
    def settle(self, data: st.DataObject, how: str, checked: bool) -> None:
        token = data.draw(st.sampled_from(sorted(self.held)))
        some = data.draw(st.sets(st.sampled_from(sorted(self.held[token])), min_size=1))
        said, back = [], []
        driver = self.driver_of[token]
        if checked and how in ("done", "again") and self.heard < set(STAGES):
            before, unheard = self.ledger.account(), sorted(some)
            answer = self.ledger.settle(driver, token, list(map(done, unheard)), checked_s=self.now_s)
            assert (answer.accepted, answer.unheard) == (0, tuple(map(str, unheard)))
            assert self.ledger.account() == before
            return
        for each in sorted(some):
            self.applied += 1
            if how == "lost":
                said.append(lost(each, "body-1", "refused"))
                self.lost["body-1", "refused"] += 1
                self.lost_ids.add(each)
            elif how == "back":
                back.append(each)
            else:
                said.append(done(each, self.applied))
                self.done.add(each)
        answer = self.ledger.settle(driver, token, said, back, checked_s=self.now_s if checked else None)
        assert (answer.accepted, answer.repeated, answer.stale, answer.unheard) == (len(some), 0, (), ())
        self.held[token] -= some
        if not self.held[token]:
            del self.held[token]
        if how == "again":
            answer = self.ledger.settle(driver, token, said, back)
            assert (answer.accepted, answer.repeated, answer.stale) == (0, len(some), ())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def another_driver_cannot_settle(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.held)))
        other = next(each for each in DRIVERS if each != self.driver_of[token])
        before = self.ledger.account()
        with pytest.raises(RefusedError) as caught:
            self.ledger.settle(other, token, [done(min(self.held[token]))])
        assert caught.value.reason == "not-yours"
        assert self.ledger.renew(other, [token], self.now_s) == ()
        assert self.ledger.account() == before

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), driver=st.sampled_from(DRIVERS))
    def a_lease_that_is_over_settles_nothing(self, data: st.DataObject, driver: str) -> None:
        each = data.draw(st.sampled_from(sorted(self.ever)))
        before = self.ledger.account()
        answer = self.ledger.settle(driver, "f" * 32, [done(each)])
        assert answer.accepted == 0
        assert bool(answer.repeated) == (each in self.done | self.lost_ids)
        assert self.ledger.account() == before

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.held)))
        assert set(self.ledger.renew(self.driver_of[token], [token, "e" * 32], self.now_s)) <= {token}

    @rule(seconds=st.floats(0.5, 15))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(data=st.data(), silent=st.booleans())
    def look_into_what_ran_out(self, data: st.DataObject, silent: bool) -> None:
        for token in self.ledger.due(self.now_s):
            assert self.ledger.renew(self.driver_of[token], [token], self.now_s) == ()
            mine = sorted(self.held.pop(token))
            stages = {each: data.draw(st.sets(st.sampled_from(STAGES))) for each in mine}
            said = report(
                {stage: [each for each in mine if stage in stages[each]] for stage in STAGES},
                answered=() if silent else tuple(self.kept.state.workers),
            )
            is_answered = not silent or not self.kept.state.announced_workers()
            is_complete = is_answered and not self.kept.state.leases[token].bereaved
            self.ledger.resolve(token, said, self.now_s)
            for each in mine:
                missing = [stage for stage in STAGES if stage not in stages[each]]
                if not missing:
                    self.done.add(each)
                elif stages[each] or not is_complete:
                    self.lost[missing[0], "driver-lost" if stages[each] else "unclear"] += 1
                    self.lost_ids.add(each)

    @rule(alive=st.sets(st.sampled_from(STAGES)))
    def announce(self, alive: set[str]) -> None:
        self.ledger.note_workers([each for each in ALIVE if each.stage in alive], self.now_s)
        self.heard |= alive

    @rule()
    def the_keeper_dies_and_comes_back(self) -> None:
        before = self.ledger.account()
        self.kept.restart(self.now_s)
        assert self.ledger.account() == before
        assert self.ledger.due(self.now_s + CONFIG.lease_s) == ()

    @rule()
    def the_journal_is_compacted(self) -> None:
        before = self.ledger.account()
        self.kept.compact(self.now_s)
        assert self.ledger.account() == before

    @invariant()
    def it_adds_up(self) -> None:
        account, state = self.ledger.account(), self.kept.state
        for tally in (account.micro_batches, account.tokens):
            assert tally.leased == tally.done + tally.lost + tally.open
        assert account.micro_batches.leased == len(self.ever)
        assert account.micro_batches.done == len(self.done)
        assert account.micro_batches.lost == len(self.lost_ids) == sum(self.lost.values())
        assert self.kept.lost() == dict(self.lost)
        assert account.tokens.leased == LAYOUT.seq_len * sum(map(LAYOUT.rows_of, self.ever))
        assert account.tokens.done == LAYOUT.seq_len * sum(map(LAYOUT.rows_of, self.done))
        assert {token: lease.open for token, lease in state.leases.items()} == self.held
        assert set(state.waiting) == self.ever - self.done - self.lost_ids - set().union(*self.held.values())
        assert account.reissued == self.given - len(self.ever)


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


# -- sets kept as intervals --------------------------------------------------------------------------------------------

_NUMBERS = st.integers(0, 30)
_STEPS = st.lists(st.tuples(st.sampled_from(["add", "drop_through"]), _NUMBERS), max_size=60)


@given(_STEPS)
def test_it_holds_what_a_set_holds_in_the_fewest_runs(steps: list[tuple[str, int]]) -> None:
    intervals, expected = Intervals(), set[int]()
    for step, number in steps:
        if step == "add":
            intervals.add(number)
            expected.add(number)
        else:
            intervals.drop_through(number)
            expected = {each for each in expected if each > number}
        runs = list(intervals)
        assert {each for first, last in runs for each in range(first, last + 1)} == expected
        assert all(before[1] + 1 < after[0] for before, after in pairwise(runs))
        assert len(intervals) == len(expected)
        assert [each in intervals for each in range(32)] == [each in expected for each in range(32)]
        assert intervals.first_gap() == min(set(range(32)) - expected)
        assert list(Intervals(runs)) == runs
