"""Workers that answer in the right form what they did not compute."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.event_loop import on_event_loop
from tests.support.toy_drive import FAST, ONE_EACH, STAGES, TWO_EACH, Drive, driving
from tests.support.toy_stage import Fault, distort, garble
from trainer.driver.auditing import _alike
from trainer.pipeline.messages import EVALUATE, FORWARD, TAIL
from trainer.subspace import ACTIVATION_CODECS, activation_codec, basis_of

AUDITED = replace(FAST, audit_every=2, malformed_ban_s=600.0)
THREE_EACH = dict.fromkeys(STAGES, 3)


def spike(tensor: Tensor) -> Tensor:
    """Of the right shape, and nothing like it."""
    return torch.zeros_like(tensor).index_put_((torch.tensor(0), torch.tensor(0), torch.tensor(0)), torch.tensor(1.0))


LIES: dict[str, Fault] = {
    "a spike": distort(spike),
    "a loss too good": garble(loss_sum=0.0),
}


async def run_with(drive: Drive) -> None:
    for toy in drive.swarm.all:
        toy.delay_s = 0.002
    await drive.driver.run()


def lie_for_ever(drive: Drive, stage: str, lie: str, *methods: str) -> str:
    """The liar's name."""
    liar = drive.swarm.at(stage)
    for method in methods:
        liar.faults[method].extend([LIES[lie]] * 10_000)
    assert liar.worker is not None
    return liar.worker.uid


@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize(("stage", "lie"), [("head", "a spike"), ("body-1", "a spike"), ("tail", "a loss too good")])
def test_a_liar_among_three_is_named_and_banned_for_long_and_nobody_else(stage: str, lie: str, routing: str) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(THREE_EACH, 80, replace(AUDITED, routing=routing), audit_seed=4) as drive:
            # By chain the driver sees evaluations only.
            real = (TAIL,) if stage == "tail" else (FORWARD,)
            name = lie_for_ever(drive, stage, lie, EVALUATE, *(real if routing == "hub" else ()))
            await run_with(drive)
            status = drive.driver.status()
            assert set(status.audit.liars) == {name}
            assert status.failures["audit"] == sum(status.audit.liars.values())
            for pool in status.stages:
                banned = {pool.names[key]: left_s for key, left_s in pool.banned.items()}
                assert set(banned) == ({name} if pool.stage == stage else set())
                assert all(left_s > 500 for left_s in banned.values())
            assert drive.work.fates() == ["done"] * 80

    test()


@on_event_loop
async def test_an_honest_swarm_is_compared_and_nobody_suspected() -> None:
    async with driving(THREE_EACH, 30, AUDITED, audit_seed=4) as drive:
        await run_with(drive)
        audit = drive.driver.status().audit
        assert (audit.disputed, audit.unopposed, audit.liars) == (0, (), {})
        assert audit.compared > 3


@on_event_loop
async def test_of_two_that_differ_none_is_banned(caplog: pytest.LogCaptureFixture) -> None:
    async with driving(TWO_EACH, 40, AUDITED, audit_seed=4) as drive:
        lie_for_ever(drive, "body-1", "a spike", FORWARD, EVALUATE)
        await run_with(drive)
        status = drive.driver.status()
        assert status.audit.disputed
        assert not status.audit.liars
        assert not any(pool.banned for pool in status.stages)
    assert "a third worker of the stage would show who is wrong" in caplog.text


@on_event_loop
async def test_in_a_stage_with_one_worker_nothing_can_be_compared_and_the_status_says_so() -> None:
    async with driving(ONE_EACH | {"tail": 2}, 40, AUDITED, audit_seed=4) as drive:
        await run_with(drive)
        audit = drive.driver.status().audit
        assert audit.unopposed == ("body-1", "head")
        assert audit.compared


@on_event_loop
async def test_a_comparison_that_nobody_answers_holds_up_nothing() -> None:
    async def stay(*_: object) -> object:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    async with driving(TWO_EACH, 20, replace(AUDITED, audit_every=1, request_timeout_s=30.0)) as drive:
        for toy in drive.swarm.all:
            toy.faults[EVALUATE].extend([stay] * 100)
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 20
        assert not drive.driver.status().audit.compared


@pytest.mark.parametrize("name", ACTIVATION_CODECS)
def test_by_every_codec_drifted_replicas_are_alike_and_noise_is_not(name: str) -> None:
    dim, rank = 32, 8
    generator = torch.Generator().manual_seed(5)
    basis = basis_of(dim, rank, 3) if name.startswith("subspace") else None
    table = 0.1 * torch.randn(50, dim, generator=generator)
    codec = activation_codec(name, basis, table if basis is not None else None)
    ids = torch.randint(50, (2, 16), generator=generator)

    def activation(values: Tensor) -> Tensor:
        return values if basis is None else values @ basis.matrix.T + table[ids]

    own = torch.randn(2, 16, rank if basis is not None else dim, generator=generator)
    drifted = own + 0.3 * torch.randn(own.shape, generator=generator)
    noise = torch.randn(own.shape, generator=generator)
    values = [
        codec.decode(codec.encode(activation(each), ids).tensors, ids)
        for each in (own, drifted, noise, torch.zeros_like(own) + own.mean())
    ]
    assert [_alike(values[0], other) for other in values] == [True, True, False, False]


def test_replicas_of_first_weights_that_are_zeros_are_alike() -> None:
    assert _alike(torch.zeros(2, 3), torch.zeros(2, 3))
    assert not _alike(torch.zeros(2, 3), torch.ones(2, 3))
