"""3 stages of 2 workers that average gradients take one process's steps; marks of what a step holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.support.gradient_group import GroupCollective, WeighedGroup
from tests.support.replica_group import run_replicas
from tests.support.stage_replicas import CUT, INNER, MicroBatch, carry, micro_batch, stage_replica
from trainer.inner import lr_at, make_optimizer
from trainer.model import build_model
from trainer.outer.grad import GradConfig, GradOutcome, GradTrainer, Progress
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.worker import ReplyCache, WorkerConfig

NUM_STAGES, NUM_STEPS = 3, 6
CLIPPED = StageConfig(clip_factor=0.5, tail_clip_factor=1.0)


class Stage:
    """Two workers of a stage, whose progress each knows."""

    def __init__(self, index: int, config: GradConfig, target_tokens: int) -> None:
        group = WeighedGroup(2)
        self.replicas = [stage_replica(index, NUM_STAGES, CLIPPED) for _ in range(2)]
        self.trainers = [
            GradTrainer(
                replica.module,
                config,
                GroupCollective(group, rank),
                optimizer=replica.optimizer,
                lr_of=lambda num_steps, _: lr_at(num_steps, INNER),
                source=replica,
                max_norm=replica.clip_norm,
                target_tokens=target_tokens,
            )
            for rank, replica in enumerate(self.replicas)
        ]
        self.target_tokens = target_tokens

    def step(self) -> list[GradOutcome]:
        outcomes: list[GradOutcome] = []
        for _ in range(2):  # One of a slice may come first.
            for trainer, replica in zip(self.trainers, self.replicas, strict=True):
                progress = Progress(replica.accumulated.num_tokens, self.target_tokens)
                trainer.progress = lambda progress=progress: progress
            found = run_replicas([trainer.look for trainer in self.trainers])
            outcomes = [outcome for outcome in found if outcome is not None]
            assert len(outcomes) == 2
            if outcomes[0].step is not None:
                break
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            assert outcome.step is not None and outcome.step.applied
            replica.set_version(outcome.step.version)
            replica.weights_changed()
        assert len({trainer.state_digest() for trainer in self.trainers}) == 1
        assert len({bits(replica) for replica in self.replicas}) == 1
        return outcomes


def bits(replica: StageReplica) -> bytes:
    return b"".join(value.numpy().tobytes() for value in replica.module.state_dict().values())


def work_of(step: int) -> list[tuple[MicroBatch, tuple[int, ...]]]:
    """Micro-batches of a step, with the worker of each stage that is to have it; of unequal numbers of tokens."""
    batches = [micro_batch(10 * step + number, rows=1 + number % 2, padded=number % 3) for number in range(4)]
    routes = [(0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 0)]
    return list(zip(batches, routes, strict=True))


@pytest.mark.parametrize("every", [0, 2], ids=["gradients alone", "slices too"])
def test_three_stages_of_two_workers_are_one_process_step_by_step(every: int) -> None:
    target_tokens = sum(int((labels != -100).sum()) for (_, _, labels), _ in work_of(0))
    config = GradConfig(ahead_s=0.0, average_state_every=every, num_slices=3)
    stages = [Stage(index, config, target_tokens) for index in range(NUM_STAGES)]
    whole = build_model(CUT, 0)
    optimizer = make_optimizer(whole, INNER)
    parameters = dict(whole.named_parameters())
    for step in range(NUM_STEPS):
        loss_sum = expected_sum = 0.0
        for batch, route in work_of(step):
            workers = [stage.replicas[worker] for stage, worker in zip(stages, route, strict=True)]
            loss_sum += carry(workers, batch)
            loss, _ = whole.loss_sum(batch[1], batch[2])
            loss.backward()
            expected_sum += float(loss.detach())
        assert loss_sum == pytest.approx(expected_sum, rel=1e-5), f"step {step}"
        norms = []
        for stage in stages:
            named = [name for name, _ in stage.replicas[0].module.named_parameters()]
            for name in named:
                gradient = parameters[name].grad
                assert gradient is not None
                gradient /= target_tokens
            norms.append(float(clip_grad_norm_([parameters[name] for name in named], stage.replicas[0].clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, INNER)
        optimizer.step()
        optimizer.zero_grad()
        for stage, norm in zip(stages, norms, strict=True):
            outcomes = stage.step()
            assert all(it.step is not None and it.step.grad_norm == pytest.approx(norm, rel=1e-4) for it in outcomes)
            for name, parameter in stage.replicas[0].module.named_parameters():
                torch.testing.assert_close(
                    parameter, parameters[name], rtol=1e-5, atol=1e-5, msg=f"{name}, step {step}"
                )


def test_what_was_counted_after_gradients_were_handed_over_is_in_no_step_yet() -> None:
    replies = ReplyCache(WorkerConfig())

    def count(key: str) -> None:
        pending = replies.begin("tail", key, math.inf)
        replies.claim(pending)  # type: ignore[arg-type]
        replies.counted(pending)  # type: ignore[arg-type]

    count("e0.s0.r0")
    mark = replies.mark()
    count("e0.s0.r1")
    replies.stepped(1, mark)
    assert replies.shared.in_weights == 1
    assert replies.taint() == 1, "the second alone is dropped"
    count("e0.s0.r2")
    replies.stepped(2, mark)  # Of the incarnation before.
    assert replies.shared.in_weights == 0
    replies.stepped(3)
    assert replies.shared.in_weights == 1


def test_sums_that_are_given_back_are_added_to_those_that_came_since() -> None:
    replica, other = (stage_replica(2, NUM_STAGES) for _ in range(2))
    trainer = GradTrainer(
        replica.module,
        GradConfig(),
        GroupCollective(WeighedGroup(1), 0),
        optimizer=replica.optimizer,
        lr_of=lambda *_: 1e-3,
        source=replica,
        max_norm=1.0,
        target_tokens=1,
    )
    for number, each in ((1, replica), (2, replica), (1, other), (2, other)):
        key, _, labels = micro_batch(number)
        hidden = torch.randn(2, 8, CUT.dim, generator=torch.Generator().manual_seed(number))
        each.tail(key, hidden, labels)
        if each is replica and number == 1:
            taken = replica.take_gradient(trainer.layout)
            assert replica.accumulated.num_micro_batches == 0
    replica.give_back(trainer.layout, taken)
    assert replica.accumulated == other.accumulated
    sums, expected = replica.state_dict()["sums"], other.state_dict()["sums"]
    assert sums.keys() == expected.keys()
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name])
