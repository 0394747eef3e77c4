"""Workers whose answers make decoders fail: it costs them their work, and no driver its life."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from torch import Tensor

from tests.support.attacks.shapes import NOT_ONLY_JSON, Liar
from tests.support.event_loop import on_event_loop
from tests.support.lying_worker import LIES, lying_worker
from tests.support.rpc_node import RUN_ID, fast_config
from tests.support.toy_drive import ONE_EACH, TWO_EACH, driving
from tests.support.toy_stage import DIM
from trainer.network.rpc import Endpoint, Identity
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.messages import FORWARD

BAN_S = 900.0
VAST = [name for name in LIES if "vast" in name or "dimension" in name or "bits" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", VAST)
@on_event_loop
async def test_a_liar_is_banned_for_long_at_once_and_the_rest_is_done(name: str) -> None:
    async with (
        lying_worker("body-1", LIES[name], dim=DIM, run_id=RUN_ID, rpc=fast_config()) as (liar, at),
        driving(ONE_EACH, 12) as drive,
    ):
        announced, honest = StageWorker("body-1", "body1.0.99", at.peer, liar.incarnation), drive.swarm.workers
        drive.swarm.workers = lambda: (*honest(), announced)  # type: ignore[method-assign]
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 12
        assert liar.asked[FORWARD] >= 1
        banned = {key: left_s for stage in drive.driver.status().stages for key, left_s in stage.banned.items()}
        assert banned[announced.key] > BAN_S


@pytest.mark.slow
@on_event_loop
async def test_what_nobody_foresaw_in_an_answer_is_told_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = False

    def unforeseen(_tensor: Tensor) -> bool:
        nonlocal failed
        if not failed:
            failed = True
            raise RuntimeError("expected a storage, found none")
        return True

    monkeypatch.setattr("trainer.pipeline.driver.links.all_finite", unforeseen)
    async with driving(TWO_EACH, 4) as drive:
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 4
        assert drive.driver.status().failures["malformed-answer"] == 1
    said = [record for record in caplog.records if record.levelno == logging.WARNING and record.exc_info]
    assert len(said) == 1
    assert "sent what cannot be handled" in said[0].getMessage()


@pytest.mark.slow
@on_event_loop
async def test_liars_of_every_kind_end_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack ``shapes``: in processes of their own they are tried in `tests/trainer/attacks`."""
    monkeypatch.setattr("trainer.network.rpc.envelope.json", NOT_ONLY_JSON)
    said = Counter[str]()
    async with driving(ONE_EACH, 60) as drive, AsyncExitStack() as stack:
        announced = []
        for number in range(12):
            endpoint = Endpoint(Identity.create(), RUN_ID, fast_config())
            liar = Liar(number, said)
            liar.register(endpoint)
            await endpoint.start()
            stack.push_async_callback(endpoint.stop)
            announced.append(StageWorker("body-1", f"body1.0.{600 + number}", endpoint.peer, liar.incarnation))
        honest = drive.swarm.workers
        drive.swarm.workers = lambda: (*honest(), *announced)  # type: ignore[method-assign]
        await drive.driver.run()
        status = drive.driver.status()
        assert status.done + status.lost == 60
        assert status.done >= 40
        assert said.total() >= 12
        banned = {key for stage in status.stages for key, left_s in stage.banned.items() if left_s > BAN_S}
        assert len(banned & {worker.key for worker in announced}) >= 6
