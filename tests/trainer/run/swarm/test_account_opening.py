"""A keeper whose journal does not tell of what the workers were trained on leases nothing, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ledger_cast import STAGES, WORKER, ListedLedger, done, micro_batches
from tests.support.model_configs import small_config
from tests.support.stage_files import random_model, write_model
from trainer.errors import TrainerUsageError
from trainer.model.plan import StagePlan
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.pipeline.ledger import LedgerConfig
from trainer.pipeline.ledger.records import WorkerSeen
from trainer.run.config import RunConfig, from_mapping
from trainer.run.swarm.account_opening import AccountOpening

ALIVE = [WorkerSeen(stage=stage, incarnation=WORKER[stage]) for stage in STAGES]
TARGET_TOKENS = 80


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    options = {
        "run_id": "r",
        "swarm": {
            "num_stages": 3,
            "stage": {"target_tokens": TARGET_TOKENS},
            "checkpoint": {"directory": str(tmp_path / "stages")},
        },
    }
    return from_mapping(RunConfig, options)


def anew(config: RunConfig) -> RunConfig:
    return replace(config, swarm=replace(config.swarm, ledger=replace(config.swarm.ledger, begin_anew=True)))


def reports(*versions: int | None) -> list[StageReport]:
    """Of a worker of each stage; None: it has none."""
    return [
        StageReport(uid=str(StageUid(stage, 40)), incarnation=WORKER[stage], status="serving", version=version)
        for stage, version in zip(STAGES, versions, strict=True)
        if version is not None
    ]


def opening_of(config: RunConfig, kept: ListedLedger) -> AccountOpening:
    return AccountOpening(config, Path("/where/journal.jsonl"), kept.ledger, STAGES)


def kept_until(version: int, leased: int = 0) -> ListedLedger:
    """An account in which all is settled up to a version, and then so many micro-batches were leased."""
    kept = ListedLedger(LedgerConfig(max_open=10**6))
    given = micro_batches(kept.ledger.lease("one", "a" * 32, (), 2, 0.0).runs)
    kept.ledger.settle("one", "a" * 32, [done(each, number) for number, each in enumerate(given, 1)])
    kept.ledger.note_workers(ALIVE, 0.0, version)
    if leased:
        kept.ledger.lease("one", "b" * 32, (), leased // 2, 0.0)
    return kept


def test_an_empty_account_begins_beside_workers_that_begin_when_all_stages_are_there(config: RunConfig) -> None:
    kept = ListedLedger(LedgerConfig())
    opening = opening_of(config, kept)
    for said in ((None, None, None), (0, 0, None)):
        assert not opening.is_over(reports(*said))
        assert kept.ledger.leases_nothing
    assert opening.is_over(reports(0, 0, 0))
    assert not kept.ledger.leases_nothing


@pytest.mark.parametrize("versions", [(None, 22, None), (0, 0, 22), (22, 22, 22)])
def test_an_empty_account_does_not_begin_beside_a_trained_worker_unless_it_is_told_to(
    versions: tuple[int | None, ...], config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ListedLedger(LedgerConfig())
    with pytest.raises(TrainerUsageError, match=r"/where/journal.jsonl, found none, while .*version 22.*begin_anew"):
        opening_of(config, kept).is_over(reports(*versions))
    assert kept.ledger.leases_nothing
    if None not in versions:
        assert opening_of(anew(config), kept).is_over(reports(*versions))
        assert "BEGINS ANEW" in caplog.text
        kept.ledger.note_workers(ALIVE, 0.0, 22)
        kept.restart(1.0)
        assert opening_of(config, kept).is_over(reports(22, 22, 22)), "told once, it need not be told again"


@pytest.mark.parametrize(
    ("versions", "leased", "fits"),
    [
        ((1000, 1000, 1000), 0, True),
        ((1010, 1010, 1010), 0, True),
        ((900, 900, 900), 0, True),
        ((1030, 1030, 1030), 0, False),
        ((1030, 1030, 1030), 60, True),
        ((1000, 1000, 10**9), 0, True),
        ((10**9, 1000, None), 0, None),
    ],
)
def test_an_account_fits_workers_that_are_ahead_by_what_was_leased_since_and_a_few_steps(
    versions: tuple[int | None, ...], leased: int, fits: bool | None, config: RunConfig
) -> None:
    kept = kept_until(1000, leased)
    opening = opening_of(config, kept)
    if fits is False:
        with pytest.raises(TrainerUsageError, match=r"that ends at version 1000 at most, while .*version 1030"):
            opening.is_over(reports(*versions))
        assert opening_of(anew(config), kept).is_over(reports(*versions))
    else:
        assert opening.is_over(reports(*versions)) == bool(fits)


@pytest.mark.parametrize("version", [0, 1000])
def test_one_liar_a_stage_keeps_no_keeper_from_beginning(version: int, config: RunConfig) -> None:
    kept = kept_until(version) if version else ListedLedger(LedgerConfig())
    assert opening_of(config, kept).is_over([*reports(*[version] * 3), *reports(*[2**53 - 1] * 3)])


def test_checkpoints_on_this_machine_tell_before_their_workers_do(config: RunConfig) -> None:
    directory, empty = Path(config.swarm.checkpoint.directory), ListedLedger(LedgerConfig())
    opening_of(config, empty).check_checkpoints()
    model = random_model(small_config())
    plan = StagePlan.of(model.config, 3)
    write_model(directory, model, plan, dict.fromkeys(plan.names, 1e9), run_id="r", version=22)
    damaged = directory / "r" / "tail" / "20260131T120000.250000Z-worker.pt"
    damaged.write_bytes(b"damaged")
    with pytest.raises(TrainerUsageError, match=r"worker.pt is of step 22"):
        opening_of(config, empty).check_checkpoints()
    opening_of(anew(config), empty).check_checkpoints()
    opening_of(config, kept_until(1000)).check_checkpoints()
