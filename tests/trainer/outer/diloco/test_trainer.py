from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.replica_group import (
    MeetingCollective,
    Quadratic,
    Regression,
    ReplicaGroup,
    Scripted,
    drift,
    fail,
    parameter_bits,
    raising,
    rounds_of,
    run_replicas,
    same,
)
from trainer.errors import IncompatiblePeerError, TrainerError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.outer.engine.strategy import OuterResult, OuterStrategy

AVERAGING = DiLoCoConfig(inner_steps=4, outer_lr=1.0, outer_momentum=0.0)
PLAIN = DiLoCoConfig(inner_steps=20)


def node(answer=same, config: DiLoCoConfig = AVERAGING, **options) -> tuple[Quadratic, DiLoCoTrainer, Scripted]:
    model, collective = Quadratic(0), Scripted(answer)
    return model, DiLoCoTrainer(model, replace(config, **options), collective), collective


def steps(trainer: DiLoCoTrainer, num_steps: int = 4) -> OuterResult | None:
    return [trainer.after_inner_step() for _ in range(num_steps)][-1]


def train_together(num_replicas: int, config: DiLoCoConfig, num_steps: int, failing_rounds=()):
    group = ReplicaGroup(num_replicas, failing_rounds)
    models = [Regression(replica) for replica in range(num_replicas)]
    trainers = [DiLoCoTrainer(model, config, MeetingCollective(group, rank)) for rank, model in enumerate(models)]
    results = run_replicas(
        [lambda m=model, t=trainer: rounds_of(m, t, num_steps) for model, trainer in zip(models, trainers, strict=True)]
    )
    return group, models, trainers, results


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_every_replica_becomes_the_mean_of_the_replicas(num_replicas: int) -> None:
    group, models, _, _ = train_together(num_replicas, AVERAGING, num_steps=4)
    assert len({parameter_bits(model) for model in models}) == 1
    start = DiLoCoTrainer(Regression(0), AVERAGING, LocalCollective()).shared_state().anchor
    replicas = torch.stack([start - brought.vector for brought in group.history[0]])
    now = torch.cat([parameter.detach().flatten() for parameter in models[0].parameters()])
    torch.testing.assert_close(now, replicas.double().mean(dim=0).float(), rtol=0, atol=2**-22)
    assert (replicas[0] - replicas[1]).abs().max() > 0.001


@pytest.mark.parametrize("config", [DiLoCoConfig(inner_steps=5), DiLoCoConfig(inner_steps=6, num_fragments=3)])
def test_members_have_identical_state_after_every_round(config: DiLoCoConfig) -> None:
    group, models, trainers, results = train_together(3, config, num_steps=30)
    digests = [[brought.state_digest for brought in meeting] for meeting in group.history]
    assert len(group.history) == 30 * config.num_fragments // config.inner_steps
    assert all(len(set(at_once)) == 1 for at_once in digests)
    assert len({at_once[0] for at_once in digests}) == len(digests)
    assert len({trainer.state_digest() for trainer in trainers}) == 1
    assert (len({parameter_bits(model) for model in models}) == 1) == (config.num_fragments == 1)
    assert all(result.committed for replica in results for result in replica)


def test_a_node_alone_applies_its_own_pseudo_gradient() -> None:
    model = Quadratic(0)
    start = model.x.detach().clone()
    trainer = DiLoCoTrainer(model, replace(AVERAGING, outer_lr=0.5), LocalCollective("me"))
    assert isinstance(LocalCollective(), Collective) and isinstance(trainer, OuterStrategy)
    drift(model, -1.0)
    results = [trainer.after_inner_step() for _ in range(4)]
    assert results[:3] == [None] * 3 and results[3].committed and results[3].report.members == ("me",)
    assert torch.equal(model.x.detach(), start - 0.5)
    assert (results[3].round_index, trainer.round_index, trainer.outer_step, results[3].num_batches) == (0, 1, 1, 4)


def test_a_failed_round_changes_nothing_and_its_work_goes_into_the_next() -> None:
    model, trainer, collective = node(fail)
    before, start = trainer.state_digest(), model.x.detach().clone()
    drift(model, -1.0)
    failed = steps(trainer)
    assert not failed.committed and "nobody came" in failed.error and failed.report is None
    assert trainer.state_digest() == before and trainer.round_index == 0
    assert torch.equal(model.x.detach(), start - 1.0), "local training goes on from where it was"
    drift(model, -2.0)
    collective.answer = same
    assert steps(trainer).committed
    first, second = collective.contributions
    assert first.round_index == second.round_index == 0
    assert torch.equal(second.vector, torch.full((16,), 3.0)), "measured from the old anchor"
    assert (first.num_batches, second.num_batches) == (4, 8)
    assert torch.equal(model.x.detach(), start - 3.0)


@pytest.mark.parametrize(
    "spoil",
    [lambda it: it * torch.nan, lambda it: it * torch.inf, lambda it: it[1:], lambda it: torch.full_like(it, 3e38)],
    ids=["nan", "inf", "short", "overflow"],
)
def test_a_result_that_cannot_be_applied_is_a_failed_round(spoil) -> None:
    model, trainer, collective = node(lambda contribution: spoil(contribution.vector), outer_lr=2.0)
    before = trainer.state_digest()
    drift(model, -1.0)
    parameters = parameter_bits(model)
    result = steps(trainer)
    assert not result.committed and result.error
    assert trainer.state_digest() == before and parameter_bits(model) == parameters
    collective.answer = raising(IncompatiblePeerError("another architecture"))
    with pytest.raises(TrainerError, match="another architecture"):  # Other errors come out.
        steps(trainer)
    assert trainer.state_digest() == before and trainer.round_index == 0


def test_parameters_that_are_not_finite_restart_from_the_anchor_and_count_for_nothing() -> None:
    model, trainer, collective = node()
    start = model.x.detach().clone()
    with torch.no_grad():
        model.x[3] = torch.nan
    steps(trainer)
    assert collective.contributions[0].num_batches == 0 and not collective.contributions[0].vector.any()
    assert torch.equal(model.x.detach(), start)


def test_peers_that_wait_bring_the_round_forward_or_are_answered_between_steps() -> None:
    _, trainer, collective = node(inner_steps=100)
    assert trainer.after_inner_step() is None and trainer.answer_others() is None
    collective.peers_wait = True
    result = trainer.after_inner_step()
    assert result is not None and result.committed and result.num_batches == 2
    collective.peers_wait = False
    assert [trainer.after_inner_step() for _ in range(99)] == [None] * 99
    assert trainer.after_inner_step() is not None, "the next one is a whole inner loop later"
    trainer.after_inner_step()
    collective.peers_wait = True
    result = trainer.answer_others()
    assert result is not None and result.committed and result.num_batches == 1


@pytest.mark.parametrize("num_steps", [1, 5, 19])
def test_a_round_asked_for_early_moves_the_anchor_by_no_more_than_its_share_of_a_full_one(num_steps: int) -> None:
    def moved_by_seventh_round(steps_of_last: int) -> Tensor:
        model, trainer, collective = node(config=PLAIN)
        for step in range(6 * 20 + steps_of_last):
            before = trainer.shared_state().anchor
            drift(model, -0.01)
            collective.peers_wait = step == 6 * 20 + steps_of_last - 1
            result = trainer.after_inner_step()
        assert result is not None and result.round_index == 6
        assert collective.contributions[-1].progress == pytest.approx(steps_of_last / 20)
        return before - trainer.shared_state().anchor

    full, early = moved_by_seventh_round(20), moved_by_seventh_round(num_steps)
    assert bool((early > 0).all()) and bool((early <= num_steps / 20 * full + 1e-5).all())


def test_all_members_apply_the_progress_that_they_agreed_on() -> None:
    digests = set()
    for num_steps in (2, 9):  # Of their own they would have another each.
        _, trainer, collective = node(lambda contribution: torch.ones_like(contribution.vector), PLAIN)
        collective.progress = 0.25
        steps(trainer, num_steps)
        collective.peers_wait = True
        trainer.answer_others()
        digests.add(trainer.state_digest())
        assert trainer.shared_state().num_inner_steps == 5
    assert len(digests) == 1


def test_a_node_knows_what_of_its_work_the_others_do_not_have() -> None:
    _, trainer, collective = node()
    for step in range(7):
        trainer.after_inner_step(num_batches=0 if step == 5 else 2)
    assert trainer.unshared == (3, 4)
    collective.answer = fail
    trainer.after_inner_step(num_batches=2)
    assert trainer.unshared == (4, 6)


@pytest.mark.parametrize("overlap_steps", [0, 3])
def test_a_node_that_leaves_shares_what_it_has_and_only_that(overlap_steps: int) -> None:
    _, trainer, collective = node(inner_steps=100, overlap_steps=overlap_steps)
    assert trainer.share() is None and not collective.contributions
    steps(trainer, 7)
    result = trainer.share()
    assert result is not None and result.committed and result.num_batches == 7
    assert trainer.share() is None and len(collective.contributions) == 1


def test_batches_are_counted_by_fragment_and_skipped_steps_are_not() -> None:
    collective = Scripted()
    trainer = DiLoCoTrainer(Regression(0), DiLoCoConfig(inner_steps=6, num_fragments=3), collective)
    for step in range(12):
        trainer.after_inner_step(num_batches=0 if step == 1 else 1)
    assert [brought.round_index for brought in collective.contributions] == [0, 1, 2, 3, 4, 5]
    assert [brought.num_batches for brought in collective.contributions] == [1, 3, 5, 6, 6, 6]
    sizes = [layout.num_values for layout in trainer.plan.layouts]
    assert [brought.vector.numel() for brought in collective.contributions[:3]] == sizes


def test_reference_and_residual_go_from_a_result_into_the_next_contribution() -> None:
    model, trainer, collective = node(lambda contribution: contribution.vector * 0.5, inner_steps=1)
    collective.residual = torch.full((16,), 0.25)
    for answer in (collective.answer, fail, same):
        collective.answer = answer
        drift(model, -1.0)
        trainer.after_inner_step()
    first, *later = collective.contributions
    assert not first.reference.any() and first.residual is None
    assert all(torch.equal(brought.reference, torch.full((16,), 0.5)) for brought in later)
    assert all(torch.equal(brought.residual, torch.full((16,), 0.25)) for brought in later)


def test_a_late_joiner_becomes_a_member() -> None:
    config = DiLoCoConfig(inner_steps=6, num_fragments=3)
    _, _, trainers, _ = train_together(2, config, 10)
    joiner_model = Regression(9)
    drift(joiner_model, 0.3)
    joiner = DiLoCoTrainer(joiner_model, config, LocalCollective())
    shared = trainers[0].shared_state()
    assert shared.digest() == trainers[0].state_digest()
    joiner.adopt(shared)
    assert joiner.state_digest() == trainers[1].state_digest()
    assert (joiner.round_index, joiner.outer_step, shared.fragment, shared.num_inner_steps) == (5, 1, 2, 10)
    assert torch.equal(joiner.plan.whole().gather(dict(joiner_model.named_parameters())), shared.anchor)
    assert joiner.inner_step == 0


def test_a_state_of_another_model_is_refused() -> None:
    trainer = DiLoCoTrainer(Regression(0), AVERAGING, LocalCollective())
    before, own = trainer.state_digest(), trainer.shared_state()
    for broken in (
        node()[1].shared_state(),
        replace(own, momentum=own.momentum[1:]),
        replace(own, anchor=own.anchor * torch.nan),
        replace(own, outer_step=-1),
        replace(own, fragment=1),
    ):
        with pytest.raises(IncompatiblePeerError, match="the state to adopt"):
            trainer.adopt(broken)
    assert trainer.state_digest() == before


def test_the_digest_covers_every_number_and_vector() -> None:
    shared = node()[1].shared_state()
    last = torch.zeros_like(shared.anchor)
    last[-1] = 1.0
    changes: dict[str, object] = dict.fromkeys(("outer_step", "fragment", "num_inner_steps", "vocab_rows"), 7)
    changes |= {name: getattr(shared, name) + last for name in ("anchor", "momentum", "reference")}
    for field, changed in changes.items():
        assert replace(shared, **{field: changed}).digest() != shared.digest(), field
