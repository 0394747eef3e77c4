"""Workers that answer in the right form what they did not compute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.lying_replica import lie_named
from tests.support.rpc_node import running_endpoint
from tests.support.small_pipeline import SmallPipeline, Windows
from tests.support.stage_worker import RUN_ID, WorkerSetup
from tests.support.toy_stage import (
    FAST,
    ONE_EACH,
    STAGES,
    TWO_EACH,
    Drive,
    Fault,
    Reply_,
    ToyStage,
    distort,
    driving,
    garble,
    say_nothing,
)
from tests.support.waiting import until
from trainer.compression.activations import ACTIVATION_CODECS, activation_codec
from trainer.model.subspace import basis_of
from trainer.pipeline.driver import LinkForm, MicroBatchResult
from trainer.pipeline.driver.auditing import (
    FORGIVEN_AFTER,
    STRIKES,
    AuditRates,
    StageOutput,
    difference,
    output_of,
)
from trainer.pipeline.protocol.messages import BACKWARD, EVALUATE, FORWARD, TAIL
from trainer.pipeline.protocol.tensors import TensorAnswer

AUDITED = replace(FAST, audit_every=2, malformed_ban_s=600.0, request_timeout_s=10.0, unclear_s=10.0)
THREE_EACH = dict.fromkeys(STAGES, 3)


def spike(tensor: Tensor) -> Tensor:
    """Of the right shape, and nothing like it."""
    return torch.zeros_like(tensor).index_put_((torch.tensor(0), torch.tensor(0), torch.tensor(0)), torch.tensor(1.0))


LIES: dict[str, Fault] = {
    "a spike": distort(spike),
    "a loss too good": garble(loss_sum=0.0),
    "1,000 times": distort(lambda values: 1000 * values),
    "another each time": distort(torch.randn_like),
}
COUNTING = {"head": (FORWARD,), "body-1": (FORWARD, BACKWARD), "tail": (TAIL,)}


async def run_with(drive: Drive) -> None:
    for toy in drive.swarm.all:
        toy.delay_s = 0.002
    await drive.driver.run()


def lie_for_ever(liar: ToyStage, lie: Fault, *methods: str) -> str:
    """By these methods, or all by which its stage answers; returns the liar's name."""
    for method in methods or (EVALUATE, *COUNTING[liar.stage]):
        liar.faults[method].extend([lie] * 10_000)
    return liar.worker.uid


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize(
    ("stage", "lie"), [("head", "a spike"), ("body-1", "1,000 times"), ("tail", "a loss too good")]
)
async def test_a_liar_among_three_is_named_and_banned_for_long_and_nobody_else(stage, lie, routing):
    async with driving(THREE_EACH, 80, replace(AUDITED, routing=routing), audit_seed=4) as drive:
        name = lie_for_ever(drive.swarm.at(stage), LIES[lie])
        await run_with(drive)
        status = drive.driver.status()
        assert set(status.audit.liars) == {name}
        assert status.failures["audit"] == sum(status.audit.liars.values())
        for pool in status.stages:
            banned = {pool.names[key]: left_s for key, left_s in pool.banned.items()}
            assert set(banned) == ({name} if pool.stage == stage else set())
            assert all(left_s > 500 for left_s in banned.values())
        assert drive.work.fates() == ["done"] * 80


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(EVALUATE,), ()], ids=["lies when asked", "honest when asked"])
@pytest.mark.parametrize(("stage", "method"), [("body-1", BACKWARD), ("tail", TAIL)])
@pytest.mark.parametrize(("replicas", "factor"), [(1, -3), (2, -3), (2, 0)])
async def test_a_gradient_that_is_not_the_output_s_convicts_by_itself(replicas, factor, stage, method, asked):
    async with driving(TWO_EACH | {stage: replicas}, 40, AUDITED, audit_seed=4) as drive:
        lie = distort(lambda gradient: factor * gradient, name="gradient")
        name = lie_for_ever(drive.swarm.at(stage), lie, method, *asked)
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: bool(drive.driver.status().audit.liars) or running.done())
        drive.driver.stop()
        await running
        assert drive.driver.status().audit.liars == {name: 1}
        assert drive.driver.status().audit.undecided == ()


@pytest.mark.slow
async def test_half_of_a_stage_may_lie_where_they_contradict_themselves() -> None:
    async with driving(TWO_EACH, 60, AUDITED, audit_seed=4) as drive:
        liar = lie_for_ever(drive.swarm.at("head"), LIES["another each time"])
        await run_with(drive)
        assert set(drive.driver.status().audit.liars) == {liar}


@pytest.mark.slow
async def test_a_lone_head_that_took_its_first_step_between_two_passes_is_not_banned() -> None:
    async def before_the_first_step(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
        answer = await work()
        tensors = {name: torch.zeros_like(tensor) for name, tensor in answer.tensors.items()}
        return TensorAnswer(answer.body.model_copy(update={"version": 0}), tensors)

    async with driving(ONE_EACH, 20, replace(AUDITED, max_in_flight=1), audit_seed=4) as drive:
        head = drive.swarm.at("head")
        head.version = 1
        head.faults[FORWARD].extend([before_the_first_step] * 3)
        await run_with(drive)
        audit = drive.driver.status().audit
        assert (audit.liars, audit.unopposed) == ({}, ("body-1", "head", "tail"))
        assert not any(pool.banned for pool in drive.driver.status().stages)


@pytest.mark.slow
async def test_of_two_heads_that_differ_none_is_banned_and_both_are_named() -> None:
    async with driving(TWO_EACH, 40, AUDITED, audit_seed=4) as drive:
        lie_for_ever(drive.swarm.at("head"), LIES["a spike"])
        await run_with(drive)
        status = drive.driver.status()
        assert status.audit.disputed
        assert not status.audit.liars
        assert not any(pool.banned for pool in status.stages)
        assert status.audit.undecided == (("head.0.32", "head.0.33"),)


@pytest.mark.slow
async def test_a_comparison_that_nobody_answers_holds_up_nothing() -> None:
    async with driving(TWO_EACH, 20, replace(AUDITED, audit_every=1, request_timeout_s=30.0)) as drive:
        for toy in drive.swarm.all:
            toy.faults[EVALUATE].extend([say_nothing] * 100)
        await drive.all_done()
        assert not drive.driver.status().audit.compared


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize("codec", ["int8", "subspace+fp16"])
async def test_what_a_codec_sends_is_passed_on_as_it_is_and_honest_workers_are_alike(routing, codec):
    setup = WorkerSetup(codec=codec, model={"subspace_rank": 4} if codec.startswith("subspace") else {})
    results, work = list[MicroBatchResult](), Windows(12)
    config = {"routing": routing, "audit_every": 1, "max_in_flight": 1}
    async with SmallPipeline(setup, TWO_EACH) as pipeline, running_endpoint(run_id=RUN_ID) as endpoint:
        driver = pipeline.driver(endpoint, work, config=config, on_result=results.append)
        await driver.run()
    audit = driver.status().audit
    assert audit.compared
    assert (audit.disputed, audit.unopposed, work.fates()) == (0, (), ["done"] * 12)
    assert all(0 < result.outcome.loss_sum / result.outcome.num_tokens < 10 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize("lie", ["-3 x gradient", "-3 x gradient, honest when asked", "1,000 x activation"])
async def test_one_of_two_that_lies_is_found_early_and_the_honest_one_is_not_accused(lie, routing):
    (stage, lying), work = lie_named(lie), Windows(40)
    setup = WorkerSetup(codec="int8")
    async with SmallPipeline(setup, TWO_EACH) as pipeline, running_endpoint(run_id=RUN_ID) as endpoint:
        liar = pipeline.at(stage)[0]
        lying.begin(liar.running.worker)
        driver = pipeline.driver(endpoint, work, config={"routing": routing, "max_in_flight": 2}, audit_seed=1)
        await driver.run()
    assert driver.status().audit.liars == {liar.announced.uid: 1}
    assert work.fates() == ["done"] * 40


@pytest.mark.parametrize("name", ACTIVATION_CODECS)
def test_by_every_codec_drifted_replicas_are_alike_and_noise_is_not_scaled_down_or_not(name: str) -> None:
    dim, rank = 32, 8
    generator = torch.Generator().manual_seed(5)
    basis = basis_of(dim, rank, 3) if name.startswith("subspace") else None
    table = 0.1 * torch.randn(50, dim, generator=generator)
    codec = activation_codec(name, basis, table if basis is not None else None)
    ids, form = torch.randint(50, (2, 16), generator=generator), LinkForm(codec, dim)
    own = torch.randn(2, 16, rank if basis is not None else dim, generator=generator)
    noise, other_noise = (torch.randn(own.shape, generator=generator) for _ in range(2))
    said = []
    zeros = torch.zeros_like(own)
    for each in (own, own + 0.3 * noise, other_noise, zeros + own.mean(), 1000 * own, zeros):
        activation = each if basis is None else each @ basis.matrix.T + table[ids]
        said.append(output_of(form, codec.encode(activation, ids).tensors, ids))
    assert [difference(said[0], other) is None for other in said] == [True, True, False, False, False, False]

    gradient = torch.randn(2, 16, dim, generator=generator)

    def told(factor: float, scale: float = 1.0) -> StageOutput:
        return output_of(form, codec.grad_encode(factor * scale * gradient).tensors, ids, scale=scale)

    assert difference(told(1.0), told(1.0, scale=1 / 64)) is difference(told(1.0), told(1.7)) is None
    for factor in (-3.0, -1.0, 0.0, 5.0, 0.2):
        assert str(difference(told(1.0), told(factor))).startswith("gradient: ")


def test_first_weights_that_are_zeros_are_alike_and_losses_within_half_or_a_nat() -> None:
    zeros, ones = StageOutput(torch.zeros(2, 3)), StageOutput(torch.ones(2, 3))
    assert difference(zeros, zeros) is None
    assert difference(zeros, ones)
    said = [StageOutput(loss=loss) for loss in (8.0, 4.5, 3.5, 0.5, 0.0)]
    assert [difference(said[0], other) is None for other in said] == [True, True, False, False, False]
    assert difference(said[3], said[4]) is None


def test_whoever_does_well_is_audited_less_and_whoever_was_wrong_always() -> None:
    rates, seen = AuditRates(64), []
    for _ in range(20):
        seen.append(rates.rate("a"))
        rates.passed("a")
    assert seen[:6] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert seen[-1] == 1 / 64
    assert not any(rates.struck("a") for _ in range(STRIKES - 1))
    assert rates.rate("a") == 1.0
    for _ in range(FORGIVEN_AFTER):
        rates.passed("a")
    assert rates.rate("a") == 1 / 64
    assert [rates.struck("b") for _ in range(STRIKES)] == [False] * (STRIKES - 1) + [True]
    assert AuditRates(0).rate("a") == 0.0
