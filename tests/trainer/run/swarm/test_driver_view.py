"""What a driver shows over HTTP: pictures that its own loop took, of workers of its own run file."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.text_store import text_store
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint, Identity
from trainer.pipeline.driver.balancer import WorkerLoad
from trainer.pipeline.driver.results import AuditStatus, DriverStatus, StageStatus
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import NodeStats
from trainer.run.swarm.announcing import Presence
from trainer.run.swarm.driver_view import DriverView
from trainer.run.swarm.shape import SwarmShape, shape_of

OWN, STRANGE = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def config() -> RunConfig:
    content = {"data": {"store": str(text_store())}, "model": {"preset": "tiny"}, "swarm": {"num_stages": 3}}
    return from_mapping(RunConfig, content)


@pytest.fixture(scope="module")
def shape(config: RunConfig) -> SwarmShape:
    return shape_of(config)


class Living:
    """A driver that belongs to the thread it was made in, as all of its dictionaries do."""

    def __init__(self) -> None:
        self.done = 3
        self.silent: dict[str, float] = {}
        self.audit = AuditStatus()
        self._thread = threading.get_ident()

    def status(self) -> DriverStatus:
        assert threading.get_ident() == self._thread
        load = WorkerLoad(OWN, runtime_s=0.0, s_per_unit=1.0, proven=True, in_flight=2, num_done=3)
        tail = StageStatus("tail", (load,), {OWN: "tail.0.40"}, {}, stalled_s=0.0)
        return DriverStatus(4, self.done, 0, 0, 0, 99, {}, {}, {}, (tail,), self.audit, silent=self.silent)


def tail_of(shape: SwarmShape, key: str, version: int, *, fits: bool) -> Announcement:
    report = StageReport(uid=str(StageUid("tail", 40)), incarnation="1" * 16, status="serving", version=version)
    report = report.model_copy(update={"unsaved_s": 63.0, "unsaved_because": "no space left"})
    digest = shape.terms("tail").digest() if fits else "0" * 64
    return Announcement(peer_id=key, node_id="n", run_id="r", address="127.0.0.1:5", terms_digest=digest, stage=report)


def num_done(view: DriverView) -> float:
    return next(value for name, _, value in view.figures() if name == "driver_done")


def test_other_threads_are_shown_a_picture(config: RunConfig, shape: SwarmShape) -> None:
    endpoint = Endpoint(Identity.create(), config.run_id, config.rpc)
    presence = Presence(config, endpoint, shape, lambda: NodeStats(), lambda _: None)
    presence.hear((tail_of(shape, OWN, 7, fits=True), tail_of(shape, STRANGE, 900, fits=False)))
    driver, view = Living(), DriverView(config, shape, presence)
    with ThreadPoolExecutor(1) as api:
        assert api.submit(lambda: list(view.figures())).result() == []
        assert api.submit(view.stages).result().in_flight == 0
        view.begin(driver, None, endpoint)
        driver.done = 5
        assert api.submit(num_done, view).result() == 3
        view.look()
        assert api.submit(num_done, view).result() == 5
        seen = api.submit(view.stages).result()
    tail = seen.stages[-1]
    assert (seen.in_flight, tail.num_serving, tail.version) == (4, 1, 7)
    assert [(worker.peer_id, worker.in_flight) for worker in tail.workers] == [(OWN, 2)]
    assert tail.workers[0].age_s < 60
    driver.silent = {OWN: 12.0}
    view.look()
    tail = view.stages().stages[-1]
    assert (tail.workers[0].status, tail.workers[0].silent_s, tail.num_serving) == ("serving", 12.0, 0)
    assert (tail.workers[0].unsaved_s, tail.workers[0].unsaved_because) == (63.0, "no space left")
    assert tail.workers[0].differs_from == ()
    driver.audit = AuditStatus(undecided=(("head.0.32", "head.0.33"), ("tail.0.33", "tail.0.40")))
    view.look()
    assert view.stages().stages[-1].workers[0].differs_from == ("tail.0.33",)
