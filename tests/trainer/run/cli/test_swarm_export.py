"""`export --run FILE --at TIME` and `rollback`: what the stages of a swarm were, out of their checkpoints."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_actor import write_model
from tests.support.model_configs import random_model, small_config
from tests.support.observing import an_account
from tests.support.token_store import TokenStore
from tests.support.trainer_command import TrainerCommand, TrainerHere
from trainer.model import Transformer
from trainer.model.plan import StagePlan
from trainer.monitor import TallyStatus
from trainer.run.cli.app import run
from trainer.run.cli.commands import ending_texts
from trainer.run.cli.displays import settled_text
from trainer.run.config import RunConfig, from_mapping

_CONFIG = small_config(vocab_size=1024)
_PLAN = StagePlan.of(_CONFIG, 3)
_NAMED = {"head": 1200.0, "body-1": 1201.5, "tail": 1230.0}


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerCommand:
    """The command, with a store of one shard and 1,000 ids."""
    return TrainerCommand(TokenStore.of(tmp_path / "store", 1).url, tmp_path)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Of a run whose stages were written twice, 10 minutes apart."""
    for number in (1, 2):
        times = {stage: at + (number - 1) * 600 for stage, at in _NAMED.items()}
        write_model(tmp_path / "swarm", _model(number), _PLAN, times, run_id="trial", version=number * 10)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_id: trial\ndata: {{store: {tmp_path / 'store'}}}\ninner: {{seq_len: 32}}\n"
        f"swarm: {{num_stages: 3, checkpoint: {{directory: {tmp_path / 'swarm'}}}}}\n"
    )
    return path


def _model(number: int) -> Transformer:
    return random_model(_CONFIG, number)


@pytest.mark.slow
def test_transformers_computes_what_the_stages_did_then(here: TrainerHere, run_file: Path, tmp_path: Path) -> None:
    said = here.other("export", "--run", run_file, "--at", "1970-01-01T00:25", "--to", "hf", tmp_path / "hf")
    assert "head 19700101T002000.000000Z step 10, body-1 19700101T002001.500000Z step 10" in said
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "hf")("Of the history.")["input_ids"]])
    with torch.inference_mode():
        expected = _model(1)(ids)[..., : theirs.config.vocab_size]
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_rolled_back_the_newest_is_the_older(here: TrainerHere, run_file: Path, tmp_path: Path) -> None:
    """With the settings of its workers, as the export has them."""
    moved = (tmp_path / "swarm").rename(tmp_path / "moved")
    settings = ("--run", run_file, "--set", f"swarm.checkpoint.directory={moved}")
    assert "step 20" in here.other("export", *settings, tmp_path / "out")
    line = ("rollback", *settings, "--at", "1970-01-01T00:25")
    assert "3 newer files would be set aside" in here.other(*line, "--dry-run")
    said = here.other(*line)
    assert "tail: 19700101T002030.000000Z, step 10" in said
    assert "3 newer files set aside in" in said
    assert "step 10" in here.other("export", *settings, "--at", "now", "--to", "torchtitan", tmp_path / "titan")
    assert (tmp_path / "titan" / "genesis_model.json").exists()
    assert "0 newer files" in here.other(*line)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--at", "noon"), 2, "expected a time such as"),
        (("--at", "1970-01-01T00:20:01"), 1, "found none of body-1, tail"),
        (("--checkpoint-dir", "/nowhere"), 1, "found no whole one"),
        (("--node-id", "a"), 2, "--run: expected neither"),
    ],
)
def test_what_cannot_be_exported(here, run_file, tmp_path, options, code, said):
    assert said in here.other("export", "--run", run_file, tmp_path / "out", *options, expect=code)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_store_of_the_vocabulary_can_be_named(here: TrainerHere, run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "moved")
    said = here.other("export", "--run", run_file, tmp_path / "hf", expect=1)
    assert "found no such folder; check the path (the tokenizer's store, as the run has it; --store names" in said
    elsewhere = ("--store", tmp_path / "moved")
    assert "files, of head" in here.other("export", "--run", run_file, *elsewhere, tmp_path / "hf")
    times = {stage: at + 6000 for stage, at in _NAMED.items()}
    write_model(tmp_path / "swarm", _model(3), _PLAN, times, run_id="trial", vocabulary="0" * 64)
    said = here.other("export", "--run", run_file, *elsewhere, tmp_path / "out", expect=1)
    assert "expected the vocabulary the model was trained with (000000000000), found another" in said


def test_the_end_tells_what_is_open_and_a_command_that_exports_as_it_stands(tmp_path, capsys):
    content = {
        "run_id": "trial",
        "state_dir": str(tmp_path / "state"),
        "inner": {"seq_len": 64, "micro_batch_size": 2},
        "swarm": {"num_stages": 3, "checkpoint": {"directory": str(tmp_path / "with space")}},
    }
    config, store = from_mapping(RunConfig, content), TokenStore.of(tmp_path / "store", 1)
    file, logs = tmp_path / "run.yaml", tmp_path / "logs"
    file.write_text("run_id: trial\nswarm: {num_stages: 3}\n")
    folder = Path(config.swarm.checkpoint.directory)
    assert len(list(ending_texts(config, file, logs, time.time(), store.url))) == 2
    write_model(folder, _model(1), _PLAN, _NAMED, run_id="trial", version=10)
    _, places, told = ending_texts(config, file, logs, time.time(), store.url)
    assert places == f"checkpoints are in {folder / 'trial'}; logs are in {logs}"
    command = shlex.split(told.partition(": ")[2])
    assert command[:4] == ["python", "-m", "trainer", "export"] and command[-1] == "DIR"
    assert run([*command[3:-1], str(tmp_path / "hf")]) == 0, capsys.readouterr().err
    assert (tmp_path / "hf" / "config.json").exists()
    tally = TallyStatus(leased=112, done=88, lost=0, open=24)
    assert settled_text(an_account(micro_batches=tally, waiting=20), 11) == (
        "step 11; 112 micro-batches leased = 88 done + 0 lost + 20 handed back (the next start leases them again)"
        " + 4 begun and not settled (the next start asks the workers)"
    )
