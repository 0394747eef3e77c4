"""The steps a driver tells are the run's: over all its lives, and with those of other drivers."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.text_store import text_store
from trainer.inner import StepResult, lr_at
from trainer.network.discovery.stage_report import StageReport
from trainer.pipeline.driver.steps import StepLoss
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.data import open_session
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.driver_node import DriverNode
from trainer.run.swarm.last_account import read_last_account
from trainer.run.swarm.shape import shape_of, target_tokens_of


class Remembered:
    """A line that remembers."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def step(self, result: StepResult) -> None:
        self.results.append(result)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    content = {
        "node_id": "driver-1",
        "data": {"store": str(text_store())},
        "model": {"preset": "tiny"},
        "inner": {"warmup_steps": 100, "micro_batch_size": 2, "seq_len": 32},
        "swarm": {"num_stages": 3},
        "api": {"enabled": False},
        "state_dir": str(tmp_path),
    }
    return from_mapping(RunConfig, content)


def test_steps_and_their_rate_go_on_where_the_account_is(config: RunConfig) -> None:
    line, tokens = Remembered(), target_tokens_of(config)
    node = DriverNode(config, shape_of(config), open_session(config.data), StopRequest(), line)

    def trained(num_steps: float) -> None:
        """So much is done in the run, as the keeper says now."""
        node.view._account = (SimpleNamespace(trained_tokens=int(num_steps * tokens)), time.monotonic())

    def step() -> int:
        node._stepped(StepLoss(step=0, loss=2.0, num_tokens=tokens, micro_batches=8))
        return line.results[-1].step

    assert [step(), step()] == [0, 1], "nothing is known of the run"
    trained(40.5)
    assert step() == 39, "39 before it: it may be the fortieth that is counted there"
    assert step() == 40, "the keeper is asked every other second only"
    trained(41)
    assert step() == 41
    trained(55)
    assert step() == 54, "another driver's are among them"
    assert [result.lr for result in line.results] == [lr_at(result.step, config.inner) for result in line.results]


@pytest.mark.slow
def test_what_a_keeper_leaves_is_the_account_behind_its_own_settling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has leased and the workers it heard of are gone: in the end nothing is held, all is handed back."""
    heard_of = [
        StageReport(uid=f"{stage}.0.40", incarnation="1" * 16, status="serving") for stage in ("head", "body1", "tail")
    ]
    monkeypatch.setattr("trainer.run.swarm.driver_node.DriverNode._reports", lambda _: heard_of)
    monkeypatch.setattr("trainer.run.swarm.driver_node._FIRST_WORKERS_S", 0.0)
    content = {
        "node_id": "driver-1",
        "data": {"store": str(text_store())},
        "model": {"preset": "tiny"},
        "inner": {"micro_batch_size": 2, "seq_len": 32},
        "swarm": {"num_stages": 3, "driver": {"drain_s": 0.2}},
        "rpc": {"host": "127.0.0.1", "public_address": "127.0.0.1"},
        "api": {"enabled": False},
        "state_dir": str(tmp_path),
    }
    config, stop, began_at = from_mapping(RunConfig, content), StopRequest(), time.time() - 1
    node = DriverNode(config, shape_of(config), open_session(config.data), stop, Remembered())

    def ask_once_it_has_leased() -> None:
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            account = node.view.account()
            if account is not None and account.micro_batches.leased:
                break
            time.sleep(0.05)
        stop.ask()

    asking = threading.Thread(target=ask_once_it_has_leased)
    asking.start()
    asyncio.run(node.run())
    asking.join()
    account = read_last_account(config, began_at)
    assert account is not None
    assert account.leases == 0
    assert account.waiting == account.micro_batches.open == account.micro_batches.leased > 0
