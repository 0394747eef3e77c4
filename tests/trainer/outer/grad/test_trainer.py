"""Replicas that average gradients: one process's steps, whole or not at all, and nothing lost on the way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.support.gradient_group import (
    INNER,
    Clock,
    GradReplica,
    GroupCollective,
    WeighedGroup,
    look_all,
    look_until_step,
)
from tests.support.replica_group import Regression, Scripted, fail, parameter_bits, restore, same, to_bytes
from tests.support.waiting import wait_until
from trainer.compression.vectors import BLOCK_VALUES
from trainer.errors import CheckpointMismatchError, IncompatiblePeerError
from trainer.inner import make_optimizer
from trainer.outer.engine.collective import Contribution, FollowingPhase, RoundResult, reduce_each_phase
from trainer.outer.grad import GradConfig, GradFit

PLAIN = GradConfig(ahead_s=0.0, average_state_every=0, num_slices=2)
SLICED = GradConfig(ahead_s=0.0, average_state_every=2, num_slices=2)


def replicas_of(num: int, config: GradConfig = PLAIN, failing: tuple[int, ...] = (), **options) -> list[GradReplica]:
    group = WeighedGroup(num, failing)
    return [GradReplica(Regression(0), GroupCollective(group, rank), config, **options) for rank in range(num)]


def single_process(steps: list[list[tuple[int, int]]], max_norm: float = 1.0) -> Regression:
    """The same model, on all batches of a step, (number, tokens) each, in one process with torch's AdamW."""
    model = Regression(0)
    optimizer = make_optimizer(model, INNER)
    for batches in steps:
        optimizer.zero_grad()
        num_tokens = sum(tokens for _, tokens in batches)
        for number, tokens in batches:
            (model(number) * tokens / num_tokens).backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def assert_alike(replicas: list[GradReplica]) -> None:
    assert len({replica.bits() for replica in replicas}) == 1


@pytest.mark.parametrize("ahead_s", [0.0, 1e6], ids=["at the target", "agreed on ahead"])
@pytest.mark.parametrize("every", [0, 2])
def test_three_replicas_of_unequal_work_are_one_process_step_by_step(ahead_s: float, every: int) -> None:
    config = replace(PLAIN, ahead_s=ahead_s, average_state_every=every)
    replicas = replicas_of(3, config, target_tokens=192, max_norm=0.1)
    done: list[list[tuple[int, int]]] = []
    for step in range(8):
        work = [[(10 * step, 32)], [(10 * step + 1, 64), (10 * step + 2, 16)], [(10 * step + 3, 80)]]
        if step % 4 == 3:
            work[2], work[0] = [], [(10 * step, 160)]  # One has nothing; it takes the step all the same.
        for replica, batches in zip(replicas, work, strict=True):
            replica.clock.now_s += 1.0
            for number, tokens in batches:
                replica.count(number, tokens=tokens)
                if ahead_s and step and number % 10 != 2:  # Agrees with what it expects to have by now.
                    replica.known_tokens = 64 * (step % 2 + 1)
                    assert replica.look() is None or every
        for replica, batches in zip(replicas, work, strict=True):
            replica.collective.others_wait = not batches
        outcomes = look_until_step(replicas)
        for replica in replicas:
            replica.collective.others_wait = False
        done.append([batch for batches in work for batch in batches])
        expected = single_process(done, max_norm=0.1)
        for outcome in outcomes:
            assert outcome.step is not None and outcome.step.applied and outcome.step.version == step + 1
        for parameter, wanted in zip(replicas[0].model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-5)
        assert_alike(replicas)
        assert replicas[0].trainer.num_tokens == sum(tokens for batches in done for _, tokens in batches)


def test_a_failed_round_loses_no_gradient() -> None:
    replicas = replicas_of(2, failing=(0, 1))
    for replica in replicas:
        replica.count(1)
    for attempt in range(2):
        outcomes = look_until_step(replicas)
        assert not any(outcome.result.committed for outcome in outcomes), attempt
        assert [replica.sums.num_tokens for replica in replicas] == [32 + 32 * attempt] * 2
        assert parameter_bits(replicas[0].model) == parameter_bits(Regression(0))
        for replica in replicas:
            replica.count(2 + attempt)
            replica.clock.now_s += 1.0
    outcomes = look_until_step(replicas)
    assert all(outcome.result.committed and outcome.result.num_batches == 3 for outcome in outcomes)
    expected = single_process([[(1, 64), (2, 64), (3, 64)]])
    for parameter, wanted in zip(replicas[0].model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-5)
    assert_alike(replicas)


def test_a_delayed_step_lets_work_go_on_and_gives_back_what_failed_with_what_came_since() -> None:
    collective = Scripted()
    replica = GradReplica(Regression(0), collective, replace(PLAIN, delayed=True))
    replica.count(1, 2)
    collective.gate.clear()
    assert replica.look() is None
    assert replica.sums.num_tokens == 0, "handed over"
    before = parameter_bits(replica.model)
    replica.count(3)
    assert replica.look() is None and parameter_bits(replica.model) == before
    saved = to_bytes(trainer=replica.trainer)
    collective.gate.set()
    wait_until(lambda: replica.look() is not None, "the round to end")
    assert replica.outcomes[-1].result.committed and parameter_bits(replica.model) != before
    assert replica.sums.num_tokens == 32, "for the next step"

    again = GradReplica(Regression(0), Scripted(), replace(PLAIN, delayed=True))
    restore(saved, trainer=again.trainer)
    assert again.sums.num_tokens == 64, "what was in the round goes into the next"
    failing = GradReplica(Regression(0), failed := Scripted(), replace(PLAIN, delayed=True))
    failing.count(1, 2)
    failed.gate.clear()
    failing.look()
    failing.count(3)
    failed.answer = lambda contribution: torch.full_like(contribution.vector, math.inf)
    failed.gate.set()
    wait_until(lambda: failing.look() is not None, "the round to end")
    assert not failing.outcomes[-1].result.committed
    assert failing.sums.num_tokens == 96 and failing.sums.num_micro_batches == 3


def test_a_slice_puts_right_what_has_drifted_and_leaves_alone_what_has_not() -> None:
    replicas = replicas_of(3, SLICED)
    for step in range(2):
        for replica in replicas:
            replica.count(step)
        look_until_step(replicas)
    assert_alike(replicas)
    state = replicas[2].trainer.shared_state()
    replicas[2].trainer._install(replace(state, parameters=state.parameters + 0.5))  # As hardware might.
    for step in range(2, 9):
        for replica in replicas:
            replica.count(step)
        look_until_step(replicas)
    assert_alike(replicas)


def test_a_joiner_takes_up_the_state_and_is_bit_for_bit_one_of_them_after_the_next_step() -> None:
    replicas = replicas_of(2, SLICED)
    for step in range(4):
        for replica in replicas:
            replica.count(step)
        look_until_step(replicas)
    donor = replicas[0].trainer
    fit = GradFit(donor.layout)
    packed = fit.pack(donor.shared_state())
    assert packed is not None
    meta, tensors = packed
    group = WeighedGroup(3)
    for rank, replica in enumerate(replicas):
        replica.trainer._collective = replica.trainer._averager = GroupCollective(group, rank)
    joiner = GradReplica(Regression(0), GroupCollective(group, 2), SLICED)
    joiner.count(77)
    joiner.trainer.adopt(fit.unpack(meta, tensors))
    joiner.sums = type(joiner.sums)(joiner.model)  # The caller drops what belongs to other weights.
    joiner.trainer.source = joiner.sums
    assert joiner.bits() == replicas[0].bits()
    for replica in replicas:
        replica.count(5)
    joiner.collective.others_wait = True  # With nothing of its own: it has no weight.
    everybody = [*replicas, joiner]
    look_until_step(everybody)
    assert [it.num_batches for it in group.history[-1]] == [32, 32, 0]
    assert_alike(everybody)


def overflowing(contribution: Contribution) -> Tensor:
    """A result whose square is none."""
    result = contribution.vector.clone()
    result[:BLOCK_VALUES] = 3e38
    return result


def test_a_gradient_that_is_not_finite_counts_for_nothing_and_one_that_overflows_moves_nobody() -> None:
    replicas = replicas_of(2)
    for replica in replicas:
        replica.count(1)
    replicas[0].sums._sums["net.0.weight"].fill_(math.nan)
    outcomes = look_until_step(replicas)
    assert [outcome.step.own is None for outcome in outcomes if outcome.step is not None] == [True, False]
    assert_alike(replicas)
    assert replicas[0].trainer.num_tokens == 32
    before = parameter_bits(replicas[0].model)
    alone = GradReplica(Regression(0), Scripted(overflowing), max_norm=math.inf)
    alone.count(1, 2)
    outcome = alone.look()
    assert outcome is not None and outcome.step is not None
    assert not outcome.step.applied and outcome.result.committed, "dropped by all alike"
    assert parameter_bits(alone.model) == parameter_bits(Regression(0)) != before
    assert alone.trainer.num_steps == 1


def test_auto_step_takes_what_there_is() -> None:
    clock = Clock()
    replica = GradReplica(Regression(0), Scripted(), auto_step_s=5.0, target_tokens=10**6, clock=clock)
    clock.now_s = 60.0
    assert replica.look() is None, "there is nothing"
    replica.count(1)
    assert replica.look() is None
    clock.now_s = 66.0
    outcome = replica.look()
    assert outcome is not None and outcome.step is not None and outcome.step.own is not None
    assert outcome.step.own.num_tokens == 32
    expected = single_process([[(1, 32)]])
    for parameter, wanted in zip(replica.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-5)


def test_a_restart_goes_on_bit_for_bit() -> None:
    whole, first = (GradReplica(Regression(0), Scripted(), SLICED) for _ in range(2))
    for step in range(6):
        for replica in (whole, first) if step < 3 else (whole,):
            replica.count(step, step + 100)
            look_until_step([replica])
    second = GradReplica(Regression(0), Scripted(), SLICED)
    restore(to_bytes(model=first.model, trainer=first.trainer), model=second.model, trainer=second.trainer)
    assert second.bits() == first.bits()
    for step in range(3, 6):
        second.count(step, step + 100)
        look_until_step([second])
    assert second.bits() == whole.bits()


class Phased(Scripted):
    """Its rounds may have two phases; ``failing`` of them, counted down, have no result."""

    failing = 0

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        self.answer = same

        def second(first: RoundResult) -> Contribution:
            if self.failing:
                self.failing, self.answer = self.failing - 1, fail
            return following(first)

        return reduce_each_phase(self, contribution, second)


def factored(rank: int = 2) -> GradReplica:
    return GradReplica(Regression(0), Phased(), SLICED, powersgd_rank=rank)


def steps(replica: GradReplica, *numbers: int) -> list[bool]:
    """Counts a step's gradients and looks; whether the rounds had a result."""
    found = []
    for number in numbers:
        replica.clock.now_s += 1.0
        replica.count(number, number + 100)
        found.append(look_until_step([replica])[0].result.committed)
    return found


def test_with_factors_a_restart_goes_on_bit_for_bit() -> None:
    whole, first = factored(), factored()
    assert not whole.trainer.shared_state().basis.any()
    steps(whole, 0, 1, 2, 3, 4, 5)
    steps(first, 0, 1, 2)
    second = factored()
    restore(to_bytes(model=first.model, trainer=first.trainer), model=second.model, trainer=second.trainer)
    steps(second, 3, 4, 5)
    assert second.bits() == whole.bits()
    assert whole.trainer.shared_state().basis.any()
    for wrong in (0, 4):
        other = factored(wrong)
        before = other.bits()
        with pytest.raises(CheckpointMismatchError, match=r"collective\.powersgd_rank"):
            restore(to_bytes(model=other.model, trainer=first.trainer), model=other.model, trainer=other.trainer)
        assert other.bits() == before


def test_a_round_that_fails_in_its_second_phase_keeps_basis_and_residual() -> None:
    replica, undisturbed = factored(), factored()
    steps(replica, 0)
    state, residual = replica.trainer.shared_state(), replica.trainer.state_dict()["residual"]
    assert isinstance(residual, Tensor) and residual.any()
    replica.collective.failing = 1
    assert steps(replica, 1) == [False]
    assert replica.trainer.shared_state() is state
    assert replica.trainer.state_dict()["residual"] is residual
    assert steps(replica, 2) == [True]
    steps(undisturbed, 0)
    undisturbed.count(1, 101)
    steps(undisturbed, 2)
    torch.testing.assert_close(replica.trainer.shared_state().parameters, undisturbed.trainer.shared_state().parameters)


def test_a_joiner_with_factors_takes_up_the_basis_and_drops_its_residual() -> None:
    donor, joiner = factored(), factored()
    steps(donor, 0, 1, 2)
    steps(joiner, 7)
    fit = GradFit.of(donor.trainer.layout, 0, 2)
    packed = fit.pack(donor.trainer.shared_state())
    assert packed is not None
    joiner.trainer.adopt(fit.unpack(*packed))
    assert joiner.bits() == donor.bits()
    assert joiner.trainer.state_dict()["residual"] is None
    for rank in (0, 4):
        with pytest.raises(IncompatiblePeerError):
            GradFit.of(donor.trainer.layout, 0, rank).unpack(*packed)
    state = donor.trainer.shared_state()
    for basis in (state.basis[1:], state.basis * math.nan):
        with pytest.raises(IncompatiblePeerError, match="powersgd_basis"):
            joiner.trainer.adopt(replace(state, basis=basis))


def test_a_round_that_is_left_and_ends_later_changes_nothing() -> None:
    donor, left = factored(), factored()
    steps(donor, 0, 1)
    left.collective.gate.clear()
    left.count(0, 100)
    left.trainer._begin_gradients()
    left.trainer.adopt(donor.trainer.shared_state())
    left.collective.gate.set()
    wait_until(left.trainer._call_is_over, "the round that was left to end")
    assert torch.equal(left.trainer.shared_state().basis, donor.trainer.shared_state().basis)


class Agreed(Scripted):
    """Members go by a change of the run that this replica hears of in the round."""

    change = 0

    def reduce(self, contribution: Contribution) -> RoundResult:
        return replace(super().reduce(contribution), change=self.change)


def test_a_step_goes_by_the_change_of_the_run_that_its_members_agreed_on() -> None:
    replica = GradReplica(Regression(0), Agreed(), PLAIN)
    trainer, asked = replica.trainer, list[int | None]()

    def go_by(change: int | None) -> None:
        asked.append(change)
        number = change or 0
        trainer.configure(lr_of=lambda *_: 1e-2 / (1 + number), max_norm=1.0, target_tokens=64 + 64 * number)

    trainer.go_by = go_by
    rates = []
    for change in (0, 1, 1):
        replica.collective.change = change
        replica.count(1, 2, 3, 4)
        outcome = replica.look()
        assert outcome is not None and outcome.step is not None
        rates.append(outcome.step.lr)
    assert rates == [1e-2, 5e-3, 5e-3]
    assert asked == [None, 0, None, 1, None, 1]
    go_by(1)
    replica.count(1, 2)
    assert replica.look() is None, "the target has doubled"


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    replica = GradReplica(Regression(0), Scripted())
    replica.count(1, 2)
    look_until_step([replica])
    bits, state = replica.bits(), replica.trainer.shared_state()
    for wrong in (
        replace(state, layout_digest="0" * 64),
        replace(state, vocab_rows=5),
        replace(state, num_updates=9),
        replace(state, parameters=state.parameters * math.nan),
        replace(state, exp_avg=state.exp_avg[1:]),
        replace(state, exp_avg_sq=state.exp_avg_sq - 1.0),
    ):
        with pytest.raises(IncompatiblePeerError):
            replica.trainer.adopt(wrong)
    saved = replica.trainer.state_dict()
    for broken in ({"version": 2}, {"kind": "diloco"}, {"num_steps": -1}, {"exp_avg": torch.zeros(3)}):
        with pytest.raises(CheckpointMismatchError):
            replica.trainer.load_state_dict({**saved, **broken})
    assert replica.bits() == bits


def test_looking_before_anything_is_due_does_nothing() -> None:
    replicas = replicas_of(2)
    assert look_all(replicas) == [None, None]
    replicas[0].count(1)
    assert look_all(replicas) == [None, None]
    assert not replicas[0].trainer.num_steps
