"""Two processes of one name on one machine: the second is told so, and the name is free when the first is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.text_store import text_store
from tests.support.trainer_command import ROOT
from trainer.errors import TrainerUsageError
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.driver_node import run_driver
from trainer.run.swarm.startup import only_process

_HOLDER = """
import sys
from trainer.run.config import RunConfig
from trainer.run.swarm.startup import only_process

with only_process(RunConfig(node_id="driver-1", state_dir=sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def config_in(folder: Path, node_id: str = "driver-1") -> RunConfig:
    content = {
        "node_id": node_id,
        "state_dir": str(folder),
        "data": {"store": str(text_store())},
        "model": {"preset": "tiny"},
        "inner": {"micro_batch_size": 2},
        "swarm": {"num_stages": 3},
    }
    return from_mapping(RunConfig, content)


@pytest.mark.slow
def test_the_second_of_a_name_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "held\n"
            with pytest.raises(TrainerUsageError, match="--node-id driver-1: expected a name of its own"):
                run_driver(config_in(tmp_path), StopRequest(), None)
            with only_process(config_in(tmp_path, "driver-2")):
                pass
            with only_process(config_in(tmp_path / "elsewhere")):
                pass
        finally:
            first.kill()
            first.wait(20)
    for _ in range(2):
        with only_process(config_in(tmp_path)):
            pass


@pytest.mark.slow
def test_a_name_is_free_again_whatever_ends_its_process(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), only_process(config_in(tmp_path)):
        raise ZeroDivisionError
    with only_process(config_in(tmp_path)):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "identity").write_text("a file")
    with (
        pytest.raises(TrainerUsageError, match="state_dir: expected a folder that can be written"),
        only_process(config_in(tmp_path)),
    ):
        pass
