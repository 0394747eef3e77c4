"""DiLoCo with factored pseudo-gradients: rounds that fail, restarts, joiners, growth, and what it costs in loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.trainer_bench.powersgd import Training, trained_loss
from tests.support.replica_group import (
    MeetingCollective,
    Regression,
    ReplicaGroup,
    Scripted,
    drift,
    parameter_bits,
    restore,
    run_replicas,
    to_bytes,
)
from trainer.collective import CollectiveConfig
from trainer.errors import CheckpointMismatchError, IncompatiblePeerError, TrainerUsageError
from trainer.model import ModelConfig, Transformer, grow_vocabulary, preset
from trainer.model.init import init_weights
from trainer.network.transfer import describe
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import (
    Contribution,
    FollowingPhase,
    LocalCollective,
    RoundResult,
    reduce_each_phase,
)
from trainer.run.config import RunConfig
from trainer.run.node.state_form import StateFit

CONFIGS = {
    "whole": DiLoCoConfig(inner_steps=3),
    "fragments": DiLoCoConfig(inner_steps=4, num_fragments=2),
    "overlapped": DiLoCoConfig(inner_steps=4, num_fragments=2, overlap_steps=1),
}
NUM_STEPS = 14
RANK = 2  # Of matrices of 16 by 16: the middle one of `Regression`.


class PhasedMeeting(MeetingCollective):
    """Each phase is a meeting."""

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        return reduce_each_phase(self, contribution, following)


class Run:
    def __init__(self, config: DiLoCoConfig, number: int = 0, collective: Any = None) -> None:
        self.model = Regression(number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        collective = LocalCollective() if collective is None else collective
        self.trainer = DiLoCoTrainer(self.model, config, collective, vocab_rows=7, powersgd_rank=RANK)
        self.committed: list[bool] = []

    def train(self, first: int, stop: int) -> Run:
        for step in range(first, stop):
            self.optimizer.zero_grad()
            self.model(step).backward()
            self.optimizer.step()
            if (result := self.trainer.after_inner_step()) is not None:
                self.committed.append(result.committed)
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "diloco": self.trainer}

    def fragments(self, name: str) -> list[torch.Tensor | None]:
        return [fragment[name] for fragment in self.trainer.state_dict()["fragments"]]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_restart_goes_on_bit_for_bit(config: DiLoCoConfig) -> None:
    undisturbed = Run(config)
    saved = [to_bytes(**undisturbed.parts())]
    for step in range(NUM_STEPS):
        undisturbed.train(step, step + 1)
        saved.append(to_bytes(**undisturbed.parts()))
    assert any(basis is not None for basis in undisturbed.fragments("basis"))
    assert any(residual is not None and residual.any() for residual in undisturbed.fragments("residual"))
    for step in range(0, NUM_STEPS + 1, 3):
        restarted = Run(config)
        restore(saved[step], **restarted.parts())
        restarted.train(step, NUM_STEPS)
        assert parameter_bits(restarted.model) == parameter_bits(undisturbed.model), f"from step {step}"
        assert restarted.trainer.state_digest() == undisturbed.trainer.state_digest()


@pytest.mark.parametrize("phase", [0, 1])
def test_a_round_that_fails_in_either_phase_leaves_basis_and_residual(phase: int) -> None:
    config = CONFIGS["whole"]
    group = ReplicaGroup(2, failing_rounds=[2 + phase])  # The second round: meetings 2 and, if that is over, 3.
    replicas = [Run(config, number, PhasedMeeting(group, number)) for number in range(2)]
    run_replicas([lambda run=run: run.train(0, 3) for run in replicas])
    before = [(run.fragments("basis")[0], run.fragments("residual")[0]) for run in replicas]
    run_replicas([lambda run=run: run.train(3, 6) for run in replicas])
    for run, (basis, residual) in zip(replicas, before, strict=True):
        assert run.committed == [True, False]
        assert torch.equal(run.fragments("basis")[0], basis) and torch.equal(run.fragments("residual")[0], residual)
    run_replicas([lambda run=run: run.train(6, 9) for run in replicas])
    first, second = replicas
    assert first.committed == [True, False, True] and not torch.equal(first.fragments("basis")[0], before[0][0])
    assert first.trainer.state_digest() == second.trainer.state_digest()
    assert parameter_bits(first.model) == parameter_bits(second.model)
    assert not torch.equal(first.fragments("residual")[0], second.fragments("residual")[0])


@pytest.mark.parametrize("config", [CONFIGS["whole"], CONFIGS["fragments"]], ids=["whole", "fragments"])
def test_a_joiner_takes_the_basis_up_and_drops_its_residual(config: DiLoCoConfig) -> None:
    donor, joiner = Run(config).train(0, 6), Run(config, 1).train(0, 5)
    shared = donor.trainer.shared_state()
    assert shared.bases and shared.digest() == donor.trainer.state_digest()
    joiner.trainer.adopt(shared)
    assert joiner.trainer.state_digest() == donor.trainer.state_digest()
    assert joiner.fragments("residual") == [None] * config.num_fragments
    assert set(shared.bases) == {config.num_fragments - 1}  # The fragment with the one matrix that is factored.
    for index, basis in shared.bases.items():
        assert torch.equal(joiner.fragments("basis")[index], basis) and joiner.fragments("basis")[index] is not basis
    without = replace(shared, bases={})
    assert without.digest() != shared.digest()


@pytest.mark.parametrize("basis", [torch.full((32,), torch.nan), torch.zeros(2, 16), torch.zeros(10_000)])
def test_a_basis_that_is_none_is_refused_and_changes_nothing(basis: torch.Tensor) -> None:
    run = Run(CONFIGS["whole"]).train(0, 3)
    before = run.trainer.state_digest()
    with pytest.raises(IncompatiblePeerError, match="as basis of fragment"):
        run.trainer.adopt(replace(run.trainer.shared_state(), bases={0: basis}))
    with pytest.raises(IncompatiblePeerError, match="as basis of fragment 5"):
        run.trainer.adopt(replace(run.trainer.shared_state(), bases={5: torch.zeros(3)}))
    state = run.trainer.state_dict()
    state["fragments"][0]["basis"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointMismatchError, match="expected"):
        run.trainer.load_state_dict(state)
    assert run.trainer.state_digest() == before


def test_the_basis_begins_anew_with_a_larger_vocabulary() -> None:
    config = replace(preset("tiny", 1024), dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=32)
    model = Transformer(config)
    init_weights(model, config, 3)
    trainer = DiLoCoTrainer(model, CONFIGS["whole"], LocalCollective(), vocab_rows=1024, powersgd_rank=RANK)
    for _ in range(3):
        drift(model, 0.01)
        trainer.after_inner_step()
    assert trainer.shared_state().bases
    grow_vocabulary(model, 2048, 3)
    trainer.grow(model, 2048)
    assert not trainer.shared_state().bases
    for _ in range(3):
        drift(model, 0.01)
        result = trainer.after_inner_step()
    assert result is not None and result.committed and trainer.shared_state().bases


SHAPE = ModelConfig(vocab_size=1024, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=16)


def test_the_basis_travels_to_joiners_and_no_more_than_a_basis_does() -> None:
    model = Transformer(SHAPE)
    init_weights(model, SHAPE, 3)
    trainer = DiLoCoTrainer(model, CONFIGS["whole"], LocalCollective(), vocab_rows=1024, powersgd_rank=RANK)
    for _ in range(3):
        drift(model, 0.01)
        trainer.after_inner_step()
    fit, shared = StateFit(SHAPE, 1, max_bytes=1 << 24), trainer.shared_state()
    meta, tensors = fit.pack(shared)
    descriptor = describe(meta, tensors)
    fit.expectation(descriptor).check(descriptor)
    assert fit.unpack(meta, tensors).digest() == shared.digest()
    for spoiled in (
        {"basis.0": torch.zeros(shared.anchor.numel())},
        {"basis.0": torch.zeros(4, dtype=torch.float64)},
        {"basis.x": torch.zeros(4)},
        {"basis.00000": torch.zeros(4)},
    ):
        with pytest.raises(IncompatiblePeerError, match="expected a state of"):
            fit.expectation(describe(meta, tensors | spoiled))


def test_where_it_means_nothing_it_is_refused() -> None:
    factored = CollectiveConfig(powersgd_rank=64)
    for options in ({"strategy": "ddp", "engine": "torch"}, {"strategy": "async_sparta"}):
        with pytest.raises(TrainerUsageError, match=r"collective.powersgd_rank: expected 0 with strategy"):
            RunConfig(collective=factored, **options)
    with pytest.raises(TrainerUsageError, match=r"powersgd_rank: expected 0 \(off\) to 4096, or -1"):
        CollectiveConfig(powersgd_rank=-2)
    with pytest.raises(TrainerUsageError, match="rounds of two phases, found Scripted"):
        DiLoCoTrainer(Regression(0), CONFIGS["whole"], Scripted(), powersgd_rank=RANK)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_held_out_loss_of_15m_at_rank_64_is_within_one_percent_at_equal_tokens() -> None:
    training = Training(shape=preset("15m", 1024), num_steps=120)
    plain, factored = trained_loss(training, 0), trained_loss(training, 64)
    assert plain < 6.0, "expected to learn something: without, it is 6.9"
    assert factored < 1.01 * plain


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_third_of_the_values_learns_nearly_as_fast() -> None:
    shape = ModelConfig(vocab_size=1024, dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=192, max_seq_len=64)
    training = Training(shape=shape, num_steps=150, seq_len=32, lr=3e-3)
    plain, factored = trained_loss(training, 0), trained_loss(training, 12)
    assert plain < 6.0, "expected to learn something: without, it is 6.9"
    assert factored < 1.03 * plain
