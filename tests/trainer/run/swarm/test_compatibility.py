"""Whom a newcomer stays with, and that workers which begin with a model begin with the same one."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import pytest
import torch

from manifests import FIRST_MERGE_ID, VocabularyFile
from tests.support.pipeline_swarm import STAGES
from tests.support.rpc_node import running_endpoint
from tests.support.small_store import text_store
from trainer.checkpoint.stages import StageCheckpoints, StageState, fingerprint
from trainer.collective import Terms
from trainer.errors import CheckpointError, IncompatiblePeerError, RefusedError
from trainer.model import build_model, export_hf
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint, Reply, Request
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import TERMS, FitCheck, NodeStats, register_terms
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.lifecycle import check_first_weights
from trainer.run.swarm.peer_view import DriverPeerView, SwarmPeers
from trainer.run.swarm.shape import DRIVER, SwarmShape, shape_of


def config_with(swarm: dict[str, object] | None = None, **changes: object) -> RunConfig:
    content = {"data": {"store": str(text_store())}, "device": "cpu", "model": {"preset": "tiny"}}
    return from_mapping(RunConfig, {**content, "swarm": {"num_stages": 3, **(swarm or {})}, **changes})


@pytest.fixture(scope="module")
def ours() -> SwarmShape:
    return shape_of(config_with())


@pytest.fixture(scope="module")
def theirs() -> SwarmShape:
    return shape_of(config_with(seed=77))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stand after a moment."""
    for name in ("_SETTLE_S", "_STANDS_S", "_AGAIN_S"):
        monkeypatch.setattr(f"trainer.run.node.identity.{name}", 0.05)


def check_among(own: Endpoint, shape: SwarmShape, heard: list[Announcement]) -> FitCheck:
    return SwarmPeers(config_with(), shape, lambda: tuple(heard)).fit_check(own)


async def a_driver(stack: AsyncExitStack, shape: SwarmShape, name: str) -> Announcement:
    """One that answers what it drives."""
    endpoint = await stack.enter_async_context(running_endpoint())
    register_terms(endpoint, shape.terms(DRIVER))
    digest = shape.terms(DRIVER).digest()
    return Announcement(
        peer_id=endpoint.peer_id, node_id=name, run_id="r", address=endpoint.address, terms_digest=digest
    )


def gone(said: Announcement) -> Announcement:
    """The same of another key, at an address where nobody listens."""
    return said.model_copy(update={"peer_id": "f" * 64, "address": "127.0.0.1:9"})


@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_one_that_fits_is_company_enough(is_there, ours, theirs, monkeypatch):
    monkeypatch.setattr("trainer.run.node.identity._SETTLE_S", 0.2)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        strangers = [await a_driver(stack, theirs, f"stranger-{number}") for number in range(4 if is_there else 2)]
        resident = await a_driver(stack, ours, "resident")
        view = DriverPeerView(config_with(discovery={"initial_peers": ["127.0.0.1:9"]}), own, ours, NodeStats, print)
        view.heard = lambda: (*strangers, resident if is_there else gone(resident))
        async with asyncio.timeout(30):
            with nullcontext() if is_there else pytest.raises(IncompatiblePeerError, match="seed 77"):
                await view.check_fit(5.0, lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("like", ["the newcomer", "the others"])
async def test_the_dead_count_for_nothing(like: str, ours: SwarmShape, theirs: SwarmShape, quick: None) -> None:
    """Of a misfit that hears first of dead ones alone, and of the run itself while it works."""
    async with AsyncExitStack() as stack, running_endpoint() as own:
        residents = [await a_driver(stack, theirs, f"resident-{number}") for number in range(2)]
        of = ours if like == "the newcomer" else theirs
        dead = gone(await a_driver(stack, of, "dead"))
        heard = [dead, *(dead.model_copy(update={"peer_id": f"{number:064x}"}) for number in range(40))]
        check = check_among(own, ours, heard)
        async with asyncio.timeout(30):
            await check.begin()
            assert check.is_open
            going_on = asyncio.create_task(check.go_on())
            await asyncio.sleep(0.2)
            assert not going_on.done()
            heard += residents
            with pytest.raises(IncompatiblePeerError, match="seed 77"):
                await going_on


async def test_being_the_first_ends_the_question(ours, theirs, quick):
    async with AsyncExitStack() as stack, running_endpoint() as own:
        heard: list[Announcement] = []
        check = check_among(own, ours, heard)
        await check.begin()
        heard += [await a_driver(stack, theirs, f"newcomer-{number}") for number in range(2)]
        async with asyncio.timeout(30):
            await check.go_on()
        assert not check.is_open


async def test_a_refusal_that_says_nothing_of_terms_is_no_difference(ours: SwarmShape, theirs: SwarmShape) -> None:
    """Such as that a limit is reached."""
    async with AsyncExitStack() as stack, running_endpoint() as own:
        busy = await stack.enter_async_context(running_endpoint())

        async def answer(_request: Request[Terms]) -> Reply[Terms]:
            raise RefusedError("busy", "come again later")

        busy.register(TERMS, Terms, answer)
        at = {"peer_id": busy.peer_id, "address": busy.address}
        check = check_among(own, ours, [(await a_driver(stack, theirs, "busy")).model_copy(update=at)])
        async with asyncio.timeout(30):
            await check.begin()
        assert check.is_open


MINE, OTHER = "1" * 16, "2" * 16


@pytest.mark.parametrize(
    ("mine", "others", "joining", "fits"),
    [
        *((MINE, others, 0, True) for others in ((), (MINE, ""), (OTHER, MINE))),  # The other one is told.
        ("", (OTHER, OTHER), 0, True),  # It read none.
        *((MINE, others, 0, False) for others in ((OTHER, ""), (OTHER, "3" * 16, MINE))),
        (MINE, (OTHER, OTHER, MINE), 2, True),  # Those that serve decide,
        (MINE, (MINE, MINE, OTHER), 2, False),
        (MINE, (OTHER,), 1, False),  # and before any does whoever begins.
    ],
)
def test_who_began_with_another_model_is_told(mine: str, others: tuple[str, ...], joining: int, fits: bool) -> None:
    statuses = ["joining"] * joining + ["serving"] * (len(others) - joining)
    reports = [
        StageReport(uid=str(StageUid("tail", 40 + number)), incarnation="0" * 16, status=status, began_from=each)
        for number, (each, status) in enumerate(zip(others, statuses, strict=True))
    ]
    told = rf" tail\.0\.4\d .* {OTHER}, found /models/a with {MINE}; give all"
    with nullcontext() if fits else pytest.raises(IncompatiblePeerError, match=told):
        check_first_weights(mine, "/models/a", reports)


@pytest.mark.slow
def test_stages_begin_with_the_model_of_a_folder_unless_they_have_checkpoints(tmp_path: Path) -> None:
    tokenizer, model = tmp_path / "tokenizer.json", tmp_path / "model"
    tokenizer.write_bytes(VocabularyFile.from_pairs([(114 + 10, 111)], {"tiny": 1}).to_json())
    config = config_with({"start_from": str(model), "checkpoint": {"directory": str(tmp_path / "checkpoints")}})
    shape = shape_of(config)
    weights = build_model(shape.model, 5).state_dict()
    export_hf(weights, shape.model, tokenizer, model)
    head, built, tail = (build_stage_site(config, shape, stage) for stage in STAGES)
    assert {each.began_from for each in (head, built, tail)} == {fingerprint(model)}
    rows = slice(FIRST_MERGE_ID + 1)
    assert torch.equal(head.module.state_dict()["embedding.weight"][rows], weights["embedding.weight"][rows])
    with StageCheckpoints(config.swarm.checkpoint, config.run_id, shape.plan, "body-1", "a" * 16) as checkpoints:
        checkpoints.open(0.0)
        checkpoints.save(1.0, StageState.of_replica(shape.model, built.replica.state_dict()))
    shutil.rmtree(model)
    assert build_stage_site(config, shape, "body-1").began_from == ""
    with pytest.raises(CheckpointError):
        build_stage_site(config, shape, "tail")
