"""What `swarm up` says in the end: the settled account, where things are, and an export command that works as it is."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import pytest

from tests.support.model_configs import small_config
from tests.support.pipeline_view import an_account
from tests.support.stage_files import random_model, write_model
from tests.support.token_store import TokenStore
from trainer.model.plan import StagePlan
from trainer.monitor import TallyStatus
from trainer.run.cli.app import run
from trainer.run.cli.swarm import ending_texts
from trainer.run.cli.swarm_lines import settled_text
from trainer.run.config import RunConfig, from_mapping
from trainer.run.swarm.last_account import ledger_folder, read_last_account, write_last_account

_CONFIG = small_config(vocab_size=1024)


def _run_config(folder: Path) -> RunConfig:
    content = {
        "run_id": "trial",
        "state_dir": str(folder / "state"),
        "inner": {"seq_len": 64, "micro_batch_size": 2},
        "swarm": {"num_stages": 3, "checkpoint": {"directory": str(folder / "with space")}},
    }
    return from_mapping(RunConfig, content)


def test_what_is_open_in_the_end_is_handed_back_or_may_be_counted() -> None:
    tally = TallyStatus(leased=112, done=88, lost=0, open=24)
    settled = an_account(micro_batches=tally, waiting=24)
    assert settled_text(settled, 11) == (
        "step 11; 112 micro-batches leased = 88 done + 0 lost + 24 handed back (the next start leases them again)"
    )
    unclear = settled_text(settled.model_copy(update={"waiting": 20}), 11)
    assert unclear.endswith(" + 4 begun and not settled (the next start asks the workers)")
    done = an_account(micro_batches=TallyStatus(leased=3, done=3, lost=0, open=0), waiting=0)
    assert settled_text(done, 1) == "step 1; 3 micro-batches leased = 3 done + 0 lost"


def test_the_account_is_the_one_of_this_run_and_whole(tmp_path: Path) -> None:
    config = _run_config(tmp_path)
    assert read_last_account(config, 0.0) is None
    write_last_account(config, an_account())  # Without a folder: told, and no error.
    ledger_folder(config).mkdir(parents=True)
    began_at = time.time() - 1
    write_last_account(config, an_account())
    (found,) = ledger_folder(config).iterdir()
    assert read_last_account(config, began_at) == an_account()
    os.utime(found, (began_at - 5, began_at - 5))
    assert read_last_account(config, began_at) is None, "that is of the life before"
    found.write_text("{")
    assert read_last_account(config, 0.0) is None


def test_the_command_that_is_said_exports_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, store = _run_config(tmp_path), TokenStore.of(tmp_path / "store", 1)
    file, logs = tmp_path / "run.yaml", tmp_path / "logs"
    file.write_text("run_id: trial\nswarm: {num_stages: 3}\n")
    plan, folder = StagePlan.of(_CONFIG, 3), Path(config.swarm.checkpoint.directory)

    def said() -> list[str]:
        return list(ending_texts(config, file, logs, time.time(), store.url))

    assert said()[1] == f"checkpoints are in {folder / 'trial'}, none of head, body-1, tail; logs are in {logs}"
    assert len(said()) == 2
    times = {"head": 1200.0, "body-1": 1201.5, "tail": 1230.0}
    write_model(folder, random_model(_CONFIG, 1), plan, times, run_id="trial", version=10)
    assert said()[1] == f"checkpoints are in {folder / 'trial'}; logs are in {logs}"
    command = shlex.split(said()[2].partition(": ")[2])
    assert command[:4] == ["python", "-m", "trainer", "export"] and command[-1] == "DIR"
    assert run([*command[3:-1], str(tmp_path / "hf")]) == 0, capsys.readouterr().err
    assert (tmp_path / "hf" / "config.json").exists()
