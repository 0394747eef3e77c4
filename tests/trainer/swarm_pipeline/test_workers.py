"""Workers, drivers and keepers that join, leave, die and come back: nothing learned or counted is lost on the way."""

from __future__ import annotations

import random
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.support.pipeline_swarm import (
    DRIVERS,
    STAGES,
    PipelineSwarm,
    check_account,
    held_out_loss,
    held_out_rows,
    records_of,
    steps_of,
)
from tests.support.small_store import text_store
from tests.support.token_store import TokenStore
from tests.support.training_swarm import TERMINATED, TrainingNode, merged
from tests.support.waiting import wait_until
from trainer.checkpoint.stages import newest_set, time_us
from trainer.checkpoint.stages.naming import named_files
from trainer.checkpoint.stages.sets import SET_ASIDE
from trainer.pipeline.ledger.records import Workers
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import identity_of
from trainer.run.swarm.shape import target_tokens_of

_AWAY_S = 45.0
STRATEGIES: dict[str, dict[str, Any]] = {
    "diloco": {"strategy": "diloco", "diloco": {"inner_steps": 5}},
    "async_sparta": {"swarm": {"sparta": {"every_steps": 4, "num_slices": 4, "ghost_rounds": 2}}},
    "grad": {"strategy": "grad"},
}
SOON_GONE = {"announcement_lifetime_s": 3.0}
NUM_STEPS = 120
"""More than 50 behind the older one's last, which is as far as a worker may be behind and still count as current."""

INNER_STEPS = 20
STOPS = {
    "strategy": "diloco",
    "diloco": {"inner_steps": INNER_STEPS},
    "data": {"holdout": 1},
    "inner": {"lr": 1e-3},
    "swarm": {
        "checkpoint": {"interval_s": 3.0, "keep": 50},
        "stage": {"target_tokens": 512, "clip_factor": 1.0, "tail_clip_factor": 5.0},
    },
}
"""Clipped as by default: without, a replica's own loss jumps by more than 1 % between two steps."""


def begun_at(worker: TrainingNode) -> int | None:
    """The version a worker said it serves last, if it has said so."""
    found: list[str] = re.findall(r"serves version (\d+) at", worker.output())
    return int(found[-1]) if found else None


def files_of(swarm: PipelineSwarm, stage: str) -> set[Path]:
    config = swarm.config
    return {it.path for it in named_files(config.swarm.checkpoint.directory, config.run_id) if it.stage == stage}


def saved_versions(swarm: PipelineSwarm) -> dict[str, int]:
    return {stage: file.header.version for stage, file in swarm.checkpoints().files.items()}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_joiner_becomes_current_and_the_one_before_hands_over(strategy: str, tmp_path: Path) -> None:
    options = merged({"swarm": {"join": {"window": 0.5}, "ledger": {"worker_gone_s": 2.0}}}, STRATEGIES[strategy])
    with PipelineSwarm(tmp_path, **options) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers("head", "body-1")
        swarm.wait(lambda: all(begun_at(swarm[name]) == 0 for name in ("head", "body-1")), "two stages to be held")
        first = swarm.begin_worker("tail", "auto")
        swarm.wait_for_steps("driver-1", 20)
        assert "tail needs help most" in first.output()

        second = swarm.begin_worker("tail-second", "tail")

        def takes_part() -> bool:
            rounds = sum(len(event.fields["members"]) > 1 for event in second.events("round"))
            return rounds >= 3 and sum(event.number("num_tokens") > 0 for event in second.events("step")) >= 5

        swarm.wait(lambda: begun_at(second) is not None, "the joiner to serve")
        assert "took up the others' state" in second.output()
        assert (begun_at(second) or 0) >= 15
        swarm.wait(takes_part, "the joiner to take part")

        assert swarm.stop("tail") == [TERMINATED]
        left_s, left_after = time.monotonic(), len(steps_of(driver))
        alive = [driver, second, swarm["head"], swarm["body-1"]]
        swarm.wait_for_steps("driver-1", left_after + 10, alive=alive)
        # Its last announcement runs out, then it counts as gone, and what it took with it as perished.
        gone_s = left_s + swarm.config.discovery.announcement_lifetime_s + swarm.config.swarm.ledger.worker_gone_s + 3.0
        swarm.wait(lambda: time.monotonic() > gone_s, "the one that left to count as gone", alive=alive)
        swarm.stop_in_order("head", "body-1", "tail-second")
        losses = [step["loss"] for step in steps_of(driver)]
        account = check_account(swarm)
        versions = saved_versions(swarm)
    assert not account.micro_batches.lost
    assert not account.perished, account
    assert max(versions.values()) - min(versions.values()) <= 2
    # Neither who came nor who went took anything with it.
    assert mean(losses[left_after : left_after + 10]) < mean(losses[:5]) - 0.5
    assert mean(losses[left_after : left_after + 10]) < mean(losses[left_after - 10 : left_after]) + 0.3


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_newer_one_learned_is_not_lost_when_the_older_one_starts_first(strategy: str, tmp_path: Path) -> None:
    """Two workers of a stage on two machines stop at different times, and all start again."""
    tails = ("tail-older", "tail-newer")
    with PipelineSwarm(tmp_path, **merged({"swarm": {"join": {"window": 0.5}}}, STRATEGIES[strategy])) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers("head", "body-1")
        for name in tails:
            swarm.begin_worker(name, "tail", ["--set", f"swarm.checkpoint.directory={tmp_path / name}"])
        older, newer = (swarm[name] for name in tails)
        swarm.wait(lambda: None not in (begun_at(older), begun_at(newer)), "both tails")
        swarm.wait_for_steps("driver-1", 10)
        assert swarm.stop("tail-older") == [TERMINATED]
        others = ("head", "body-1", "tail-newer")
        swarm.wait_for_steps("driver-1", NUM_STEPS, alive=[driver, *(swarm[name] for name in others)])
        swarm.stop_in_order(*others)
        before = len(steps_of(driver))

        workers = [swarm["head"], swarm["body-1"], older]
        for worker in workers:
            worker.start()
        swarm.wait(lambda: older.output().count("serves version") == 2, "the older one to serve", alive=workers)
        newer.start()
        workers.append(newer)
        swarm.wait(lambda: newer.output().count("serves version") == 2, "the newer one to serve", alive=workers)
        assert (begun_at(newer) or 0) >= NUM_STEPS - 5
        driver.start()
        swarm.wait_for_steps("driver-1", before + 30)
        swarm.stop_in_order(*others, "tail-older")
        losses = [step["loss"] for step in steps_of(driver)]
        begun = (begun_at(older), begun_at(newer))
    assert min(version or 0 for version in begun) >= NUM_STEPS - 5, begun  # Who knew less has taken up what is known.
    assert mean(losses[-10:]) < mean(losses[before - 10 : before]) + 0.2


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "routing", [pytest.param("hub", marks=pytest.mark.long), pytest.param("chain", marks=pytest.mark.slow)]
)
def test_nothing_is_lost_or_counted_twice_by_one_that_leaves_in_the_midst_of_work(routing: str, tmp_path: Path) -> None:
    options = {
        "driver": {"routing": routing, "max_in_flight": 8},
        "ledger": {"worker_gone_s": 1.0},
        "checkpoint": {"interval_s": 0},  # On the way out only, whatever the time of day is.
    }
    with PipelineSwarm(tmp_path, swarm=options, discovery=SOON_GONE) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.begin_workers("body-1", suffix="-second")
        swarm.wait_for_steps("driver-1", 8)
        swarm.wait(lambda: begun_at(swarm["body-1-second"]) is not None, "the second to serve")
        swarm.wait_for_steps("driver-1", len(steps_of(driver)) + 6)
        assert swarm.stop("body-1") == [TERMINATED]
        left_after = len(steps_of(driver))
        swarm.wait_for_steps("driver-1", left_after + 15, alive=[driver, swarm["body-1-second"]])
        swarm.stop_in_order("head", "body-1-second", "tail")
        account = check_account(swarm)
        assert not account.micro_batches.lost, account.lost
        assert not account.perished
        assert len(files_of(swarm, "body-1")) == 2  # One each, though each saves before its last round and behind it.


@pytest.mark.long
@pytest.mark.timeout(240)
def test_one_that_is_not_current_saves_nothing(tmp_path: Path) -> None:
    options = {"join": {"window": 0.001, "idle_s": 3600.0}, "checkpoint": {"interval_s": 0}}
    with PipelineSwarm(tmp_path, swarm=options) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 5)
        late = swarm.begin_worker("tail-late", "tail")
        swarm.wait(
            lambda: re.search(r"node [0-9a-f]{64} answers at", late.output()) is not None, "the late one to listen"
        )
        swarm.wait_for_steps("driver-1", len(steps_of(driver)) + 3)
        assert swarm.stop("tail-late") == [TERMINATED]
        assert "leaving without saving" in late.output()
        assert not files_of(swarm, "tail")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["diloco", "async_sparta", "grad"])
def test_all_stop_and_go_on_and_then_go_back(strategy: str, tmp_path: Path) -> None:
    options = {"diloco": {"inner_steps": 5}, "swarm": {"ledger": {"worker_gone_s": 1.0}}, "discovery": SOON_GONE}
    with PipelineSwarm(tmp_path, strategy=strategy, **options) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 40)
        swarm.stop_in_order()
        first, moment = saved_versions(swarm), datetime.now(UTC)
        assert min(first.values()) >= 40 - 1

        lives = [len(steps_of(driver))]
        for name in ("driver-1", *STAGES):
            swarm[name].start()
        swarm.wait_for_steps("driver-1", lives[0] + 20)
        swarm.stop_in_order()
        assert {stage: begun_at(swarm[stage]) for stage in STAGES} == first
        second = saved_versions(swarm)
        assert not check_account(swarm).perished, "what all saved when all stopped, and went on with"
        assert all(second[stage] >= first[stage] + 19 for stage in STAGES)

        lives.append(len(steps_of(driver)))
        driver.start()
        for stage in STAGES:
            swarm.begin_again(stage, "--at", moment.isoformat())
        swarm.wait_for_steps("driver-1", lives[1] + 10)
        swarm.stop_in_order()
        assert {stage: begun_at(swarm[stage]) for stage in STAGES} == first
        assert all(first[stage] < version < second[stage] for stage, version in saved_versions(swarm).items())
        aside = list((tmp_path / "stages" / swarm.config.run_id / SET_ASIDE).rglob("*.pt"))
        assert sorted(path.parent.name for path in aside) == sorted(STAGES)

        losses = [step["loss"] for step in steps_of(driver)]
        check_account(swarm)
        gone = {each for record in records_of(swarm.journal) if isinstance(record, Workers) for each in record.gone}
        assert len(gone) >= 2 * len(STAGES), "all that stopped before have been missed"
    # What was learned was not learned again, and going back unlearns no more than what came after.
    for life in (slice(lives[0] - 5, lives[0]), slice(lives[0], lives[0] + 5), slice(lives[1], lives[1] + 5)):
        assert mean(losses[life]) < mean(losses[:5]) - 0.5


def rounds(swarm: PipelineSwarm, at_s: float | None = None) -> dict[str, int]:
    """The outer round each stage's newest checkpoint was taken in, now or at a moment (seconds since 1970)."""
    at_us = time_us(time.time() if at_s is None else at_s)
    found = newest_set(swarm.config.swarm.checkpoint.directory, swarm.config.run_id, at_us)
    return {stage: file.read().state.strategy["round_index"] for stage, file in found.files.items()}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stop_at_any_moment_saves_a_model_as_good_as_the_last_regular_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(11)
    with PipelineSwarm(tmp_path, **STOPS) as swarm:

        def num_steps() -> int:
            return max((step["step"] for name in DRIVERS for step in steps_of(swarm[name])), default=0)

        rows, workers = held_out_rows(swarm, 512), swarm.begin_two_of_each()
        for life in range(10):
            for node in swarm.nodes.values() if life else ():
                node.start()
            after = num_steps() + chance.randint(8, 2 * INNER_STEPS)
            swarm.wait(lambda least=after: num_steps() >= least, f"step {after}", timeout_s=300.0)
            swarm.wait(lambda: all(files_of(swarm, stage) for stage in STAGES), "a checkpoint of each stage")
            stopped_s = time.time()
            assert swarm.stop() == [TERMINATED] * len(swarm.nodes)
            regular, stopped = held_out_loss(swarm, rows, stopped_s), held_out_loss(swarm, rows)
            # A regular outer step between the two is not the stop's doing, and may cost a little for the moment.
            bound = 1.01 if rounds(swarm, stopped_s) == rounds(swarm) else 1.03
            sys.stdout.write(f"stop at step {num_steps()}: {stopped / regular:.4f} of the last checkpoint's loss\n")
            assert stopped <= bound * regular, f"{stopped:.3f} after {regular:.3f}, at step {num_steps()}"
        said = "".join(node.output() for node in workers.values())
        assert "is dropped when the others' state is taken up" not in said, "of those that were alive all the time"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_another_driver_goes_on_at_its_speed_while_the_keeper_is_killed_and_away(tmp_path: Path) -> None:
    """With larger micro-batches than in other tests, so that a minute's are fewer than a driver may hold."""
    store = TokenStore.of(tmp_path / "store", 8, shard_tokens=200_000)
    home = from_mapping(RunConfig, {"node_id": "driver-1", "state_dir": str(tmp_path / "swarm" / "home")})
    options = {
        "inner": {"seq_len": 128, "micro_batch_size": 4},
        "swarm": {"stage": {"target_tokens": 2048}, "ledger": {"keeper": identity_of(home).peer_id}},
    }

    def speed(for_s: float) -> float:
        counts, began_s = [], time.monotonic()
        for wait_s in (0.0, for_s):
            time.sleep(wait_s)
            counts.append(sum(int(step["num_tokens"]) for step in steps_of(swarm["driver-2"])))
        return (counts[1] - counts[0]) / (time.monotonic() - began_s)

    with PipelineSwarm(tmp_path / "swarm", store.folder, **options) as swarm:
        keeper, other = (swarm.begin_driver(name) for name in DRIVERS)
        workers = swarm.begin_workers(*STAGES)
        for name in DRIVERS:
            swarm.wait_for_steps(name, 4)
        time.sleep(15.0)  # For its speed to be known.
        before = speed(20.0)
        keeper.kill()
        away = speed(_AWAY_S)
        stages = swarm.stages("driver-2")
        assert stages is not None
        assert stages.keeper_away_s > _AWAY_S / 2
        keeper.start()
        wait_until(lambda: (now := swarm.stages("driver-2")) is not None and now.keeper_away_s == 0.0, "the keeper")
        swarm.wait(lambda: b'"kind":"resolved"' in swarm.journal.read_bytes(), "the dead driver's lease to be resolved")
        swarm.wait_for_steps("driver-1", 1, alive=[keeper, other, *workers])
        told = swarm.account("driver-2")
        swarm.stop_in_order(drivers=DRIVERS[::-1])
        account = check_account(swarm)
    assert away >= 0.8 * before
    assert told is not None and told.micro_batches.adds_up
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_keeper_is_killed_while_another_driver_goes_on_and_starts_again(tmp_path: Path) -> None:
    """Three stages, not synchronous: several micro-batches are under way when a driver dies."""
    ledger = {"lease_s": 5.0, "lease_margin_s": 1.0, "inquiry_s": 5.0, "reissue_after_s": 3.0}
    store = TokenStore.of(tmp_path / "store", 6, shard_tokens=20_000)
    with PipelineSwarm(tmp_path / "swarm", store.folder, swarm={"ledger": ledger}) as swarm:
        keeper, other = (swarm.begin_driver(name) for name in DRIVERS)
        workers = swarm.begin_workers(*STAGES)
        for name in DRIVERS:
            swarm.wait_for_steps(name, 8)
        told = swarm.account()
        keeper.kill()
        before, own_before = len(steps_of(other)), len(steps_of(keeper))
        swarm.wait_for_steps("driver-2", before + 1, alive=[other, *workers])  # With what it held.
        keeper.start()
        swarm.wait(lambda: b'"kind":"resolved"' in swarm.journal.read_bytes(), "the dead driver's lease to be resolved")
        for name in DRIVERS:
            swarm.wait_for_steps(name, len(steps_of(swarm[name])) + 10)
        accounts = [told, *(swarm.account(name) for name in DRIVERS)]
        swarm.stop_in_order(drivers=DRIVERS[::-1])
        account = check_account(swarm)
    assert all(it is not None and it.micro_batches.adds_up and it.tokens.adds_up for it in accounts)
    assert told is not None
    assert steps_of(keeper)[own_before]["step"] >= told.trained_tokens // target_tokens_of(swarm.config) - 1
    assert account.micro_batches.done > told.micro_batches.done
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight


@pytest.mark.long
@pytest.mark.timeout(600)
def test_max_steps_are_the_runs_and_every_driver_ends(tmp_path: Path) -> None:
    """Two drivers share a run's steps, and the one that keeps the account is the last to go."""
    with PipelineSwarm(tmp_path, text_store()) as swarm:
        drivers = [swarm.begin_driver(name, "--max-steps", "12") for name in DRIVERS]
        swarm.begin_workers(*STAGES)
        assert [driver.exit_code() for driver in reversed(drivers)] == [0, 0]
        shares = [len(steps_of(driver)) for driver in drivers]
        assert 10 <= sum(shares) <= 12  # Of each driver's last step a part may be missing.
        again = swarm.begin_again("driver-1")
        assert again.exit_code() == 0
        assert len(steps_of(again)) == shares[0]
