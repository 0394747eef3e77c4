"""The keeper of the account: which node a run takes for it, and when it begins to lease."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_actor import write_model
from tests.support.ledger_cast import STAGES, WORKER, ListedLedger, done, micro_batches
from tests.support.model_configs import random_model, small_config
from trainer.errors import TrainerUsageError
from trainer.model.plan import StagePlan
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.pipeline.ledger import LedgerConfig
from trainer.pipeline.ledger.ledger import AppliedReport
from trainer.pipeline.ledger.records import WorkerSeen
from trainer.run.cli.app import run
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import identity_of, identity_path
from trainer.run.swarm.keeper import AccountOpening, check_keeper, keeper_among, workers_seen

Options = dict[str, Any]
SEED = "/ip4/{}/tcp/4001/p2p/12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"


def config_of(folder: Path, **options: Any) -> RunConfig:
    return from_mapping(RunConfig, {"node_id": "driver-2", "state_dir": str(folder), **options})


@pytest.mark.parametrize(
    ("options", "is_private"),
    [
        ({}, False),
        ({"discovery": {"allow_private": True}}, True),
        ({"rpc": {"host": "127.0.0.1"}}, True),
        ({"rpc": {"host": "0.0.0.0", "public_address": "10.0.0.4:4100"}}, True),
        ({"rpc": {"host": "127.0.0.1", "public_address": "8.8.8.8"}}, False),
        ({"discovery": {"initial_peers": ["10.0.0.1:4100", "[fe80::1]:4100"]}}, True),
        ({"discovery": {"initial_peers": ["10.0.0.1:4100", "8.8.8.8:4100"]}}, False),
        ({"discovery": {"initial_peers": ["swarm.example.org:4100"]}}, False),
        ({"discovery": {"initial_peers": [SEED.format("8.8.8.8")]}}, False),
        ({"discovery": {"initial_peers": ["127.0.0.1:4100"]}, "rpc": {"public_address": "8.8.8.8:4100"}}, False),
    ],
)
def test_a_name_is_believed_where_all_addresses_are_private(options: Options, is_private: bool, tmp_path: Path) -> None:
    config = config_of(tmp_path, **options)
    assert config.is_private == is_private
    told = pytest.raises(TrainerUsageError, match="python -m trainer identity --node-id driver-1")
    with nullcontext() if is_private else told:
        check_keeper(config)
    check_keeper(config_of(tmp_path, **options, swarm={"ledger": {"keeper": "a" * 64}}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["--pipeline", "swarm"], ["worker", "--stage", "head"]])
def test_no_name_where_strangers_can_come(command, tmp_path, capsys):
    settings = [f"state_dir={tmp_path}", "inner.micro_batch_size=2", f"data.store={tmp_path}"]
    arguments = [*command, "--node-id", "one", *(part for each in settings for part in ("--set", each))]
    assert run(arguments) == 2
    assert "swarm.ledger.keeper: expected a key" in capsys.readouterr().err


def test_a_key_is_made_beforehand_and_told_for_the_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["identity", "--node-id", "driver-1", "--set", f"state_dir={tmp_path}"]
    assert (run(command), run(command)) == (0, 0)
    said = capsys.readouterr()
    config = config_of(tmp_path, node_id="driver-1", pipeline="swarm")
    key = identity_of(config).peer_id
    assert said.out.split() == [key, key]
    assert f"keeper: {key}" in said.err
    with pytest.raises(TrainerUsageError, match=re.escape(f"swarm: {{ledger: {{keeper: {key}}}}}")):
        check_keeper(config)  # The keeper itself is told its own.


def test_a_swarm_on_one_machine_knows_its_keeper_beforehand(tmp_path: Path) -> None:
    config = config_of(tmp_path, node_id="swarm-up")
    names = ["driver-1", "driver-2"]
    found = keeper_among(config, names)
    assert found == ("driver-1", identity_of(replace(config, node_id="driver-1")).peer_id)
    assert not identity_path(replace(config, node_id="driver-2")).exists()
    key = identity_of(replace(config, node_id="driver-2")).peer_id
    assert keeper_among(config_of(tmp_path, swarm={"ledger": {"keeper": key}}), names) == ("driver-2", key)
    for other in ("driver-3", "b" * 64):
        with pytest.raises(TrainerUsageError, match=f"found {other}"):
            keeper_among(config_of(tmp_path, swarm={"ledger": {"keeper": other}}), names)


ALIVE = [WorkerSeen(stage=stage, incarnation=WORKER[stage]) for stage in STAGES]
TARGET_TOKENS = 80


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    checkpoint, stage = {"directory": str(tmp_path / "stages")}, {"target_tokens": TARGET_TOKENS}
    return config_of(tmp_path, run_id="r", swarm={"num_stages": 3, "stage": stage, "checkpoint": checkpoint})


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
    return AccountOpening(config, "/where/journal.jsonl", kept.ledger, STAGES)


def kept_until(version: int, leased: int = 0) -> ListedLedger:
    """An account in which all is settled up to a version, and then so many micro-batches were leased."""
    kept = ListedLedger(LedgerConfig(max_open=10**6))
    given = micro_batches(kept.ledger.lease("one", "a" * 32, (), 2, 0.0).runs)
    kept.ledger.settle("one", "a" * 32, [done(each, number) for number, each in enumerate(given, 1)])
    kept.ledger.note_workers(ALIVE, 0.0, version)
    if leased:
        kept.ledger.lease("one", "b" * 32, (), leased // 2, 0.0)
    return kept


def test_a_joiner_that_becomes_another_incarnation_costs_no_lease_of_a_dead_driver() -> None:
    kept = ListedLedger(LedgerConfig(worker_gone_s=30.0))
    serving, joining = (
        reports(5, 5, 5),
        StageReport(uid=str(StageUid("tail", 41)), incarnation="e" * 16, status="joining"),
    )
    became = joining.model_copy(update={"incarnation": "f" * 16, "status": "serving", "version": 5})
    served: frozenset[str] = frozenset()
    for now_s, now in (0.0, [*serving, joining]), (1.0, [*serving, became]), (40.0, [*serving, became]):
        seen = workers_seen(now, served)
        served = frozenset(worker.incarnation for worker in seen)
        kept.ledger.note_workers(seen, now_s)
        if now_s == 1.0:
            given = micro_batches(kept.ledger.lease("dead", "a" * 32, (), 1, now_s).runs)
    assert kept.state.announced_workers() == {*WORKER.values(), "f" * 16}
    answered = AppliedReport({}, frozenset(kept.state.announced_workers()))
    resolved = kept.ledger.resolve("a" * 32, answered, 200.0)
    assert resolved is not None and not resolved.lost
    assert micro_batches(resolved.returned) == given


def test_a_worker_that_served_and_takes_itself_out_is_still_noted() -> None:
    serving = reports(5, 5, 5)
    served = frozenset(worker.incarnation for worker in workers_seen(serving, frozenset()))
    withdrawn = [serving[0].model_copy(update={"status": "joining"}), *serving[1:]]
    assert {worker.incarnation for worker in workers_seen(withdrawn, served)} == set(WORKER.values())


def test_an_empty_account_begins_beside_workers_that_begin_when_all_stages_are_there(config: RunConfig) -> None:
    kept = ListedLedger(LedgerConfig())
    opening = opening_of(config, kept)
    for said, begins in (((None, None, None), False), ((0, 0, None), False), ((0, 0, 0), True)):
        assert opening.is_over(reports(*said)) is begins is not kept.ledger.leases_nothing


@pytest.mark.parametrize("versions", [(None, 22, None), (0, 0, 22), (22, 22, 22)])
def test_an_empty_account_beside_a_trained_worker(versions, config, caplog):
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
        ((1030, 1030, 1030), 0, False),
        ((1030, 1030, 1030), 60, True),
        ((1000, 1000, 10**9), 0, True),
        ((10**9, 1000, None), 0, None),
    ],
)
def test_an_account_fits_workers_a_few_steps_ahead(versions, leased, fits, config):
    kept = kept_until(1000, leased)
    opening = opening_of(config, kept)
    if fits is False:
        with pytest.raises(TrainerUsageError, match=r"that ends at version 1000 at most, while .*version 1030"):
            opening.is_over(reports(*versions))
        assert opening_of(anew(config), kept).is_over(reports(*versions))
    else:
        assert opening.is_over(reports(*versions)) == bool(fits)


@pytest.mark.slow
def test_one_liar_a_stage_keeps_no_keeper_from_beginning_and_checkpoints_here_tell_first(config: RunConfig) -> None:
    for version, kept in ((0, ListedLedger(LedgerConfig())), (1000, kept_until(1000))):
        assert opening_of(config, kept).is_over([*reports(*[version] * 3), *reports(*[2**53 - 1] * 3)])
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
