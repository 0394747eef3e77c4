"""The command line: what wins over what, what is said of a line that makes no sense, and what is shown of a run."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import ROOT, WAIT_S, TrainerCommand, finished
from trainer.errors import TrainerUsageError
from trainer.inner import StepResult
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.run.cli.app import run
from trainer.run.cli.displays import training_display
from trainer.run.cli.train import config_of
from trainer.run.config import RunConfig, from_mapping
from trainer.run.config.unused import tell_unused, unused_options
from trainer.run.node.ports import require_free_ports, require_rounds_folder
from trainer.run.node.stopping import StopRequest


def test_options_win_over_set_which_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("node_id: a\ninner: {lr: 1.0e-3, seq_len: 128, accumulation_steps: 2}\ncheckpoint: {keep: 5}\n")
    config = config_of(file, ["inner.lr=2e-3", "inner.seq_len=256", "inner.seq_len=64"], {"lr": 3e-3})
    inner = config.inner
    assert (inner.lr, inner.seq_len, inner.accumulation_steps, inner.eps) == (3e-3, 64, 2, 1e-8)
    assert config_of(file, [], {"api_host": "0.0.0.0"}).api.host == "0.0.0.0"
    assert config_of(file, [], {"routing": "chain"}).swarm.driver.routing == "chain"
    assert (config.node_id, config.checkpoint.keep, config.checkpoint.every_steps) == ("a", 5, 10)
    assert config_of(file, ["inner.lr="], {}).inner.lr == 1e-4


def test_a_mistake_in_a_file_names_the_file_and_any_other_does_not(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("node_id: a\nmodle: {preset: tiny}\n")
    with pytest.raises(TrainerUsageError, match=rf"^{re.escape(str(file))}: modle: there is no such option; did you"):
        config_of(file, [], {})
    file.write_text("node_id: a\n")
    with pytest.raises(TrainerUsageError, match=r"^modle: there is no such option"):
        config_of(file, ["modle.preset=tiny"], {})


def test_a_taken_port_is_found_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, where in (("--port", "rpc"), ("--api-port", "api")):
            config = from_mapping(RunConfig, {"node_id": "a", where: {"host": "127.0.0.1", "port": port}})
            with pytest.raises(TrainerUsageError, match=rf"^{option} {port}: .* found it taken; .*another {option}$"):
                require_free_ports(config)
        without_api = {"node_id": "a", "api": {"host": "127.0.0.1", "port": port, "enabled": False}}
        require_free_ports(from_mapping(RunConfig, without_api))
        for option in ("--port", "--relay-port"):
            free = ["seed", "--host", "127.0.0.1", "--relay", "--port", "0", "--relay-port", "0"]
            assert run([*free, option, str(port)]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"trainer: {option} {port}: expected a port") and said.count("\n") == 1
    elsewhere = {"node_id": "a", "rpc": {"host": "192.0.2.77", "port": port}}
    with pytest.raises(TrainerUsageError, match="not of this machine"):
        require_free_ports(from_mapping(RunConfig, elsewhere))


def test_a_folder_for_rounds_that_cannot_be_written_is_one_line_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for where, said in (
        (
            "/proc/genesis",
            "--rounds /proc/genesis: expected a folder that can be made and written, found: No such file",
        ),
        (f"{tmp_path}/file", f"--rounds: expected a folder or s3://bucket/prefix, found the file {tmp_path}/file"),
        (f"{tmp_path}/file/below", f"--rounds {tmp_path}/file/below: expected a folder that can be made and written, "),
        ("s3:/bucket", "--rounds: expected "),
        ("s3://", "--rounds: expected an address such as s3://bucket/prefix"),
        ("ftp://host/rounds", "--rounds: expected a folder's path"),
        ("https://host/rounds", "--rounds: expected a store that can be written"),
        ("", "--rounds: expected s3://bucket/prefix or a folder, found an empty address"),
    ):
        assert run(["--node-id", "a", "--rounds", where, "--set", "rule.validation=log", "--no-api"]) == 2
        found = capsys.readouterr().err
        assert found.startswith(f"trainer: {said}") and found.count("\n") == 1
    fine = {"node_id": "a", "bucket": {"url": str(tmp_path / "new" / "rounds")}, "rule": {"validation": "log"}}
    require_rounds_folder(from_mapping(RunConfig, fine))
    assert list((tmp_path / "new" / "rounds").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "holds_stage", "unused"),
    [
        ({}, False, {}),
        ({"bucket": {"cdn": "https://x/y"}}, False, {"bucket.cdn": "--rounds (bucket.url)"}),
        ({"bucket": {"url": "/r", "cdn": "https://x/y"}, "rule": {"validation": "log"}}, False, {}),
        ({"sparseloco": {"inner_steps": 7}}, False, {"sparseloco.inner_steps": "strategy sparseloco"}),
        ({"strategy": "sparseloco", "sparseloco": {"inner_steps": 7}}, False, {}),
        (
            {"strategy": "sparseloco", "collective": {"compression": "int4"}},
            False,
            {"collective.compression": "strategies that have no encoding of their own"},
        ),
        (
            {"strategy": "sparseloco", "diloco": {"inner_steps": 7}, "grad": {"num_slices": 3}},
            False,
            {"diloco.inner_steps": "strategy diloco", "grad.num_slices": "strategy grad"},
        ),
        ({"swarm": {"num_stages": 2}}, True, {}),
        (
            {"swarm": {"num_stages": 2, "sparta": {"every_steps": 9}}},
            True,
            {"swarm.sparta.every_steps": "strategy async"},
        ),
        ({"swarm": {"num_stages": 2}, "pipeline": "swarm"}, False, {}),
        ({"swarm": {"num_stages": 2}}, False, {"swarm.num_stages": "--pipeline swarm, 'trainer worker' or"}),
        ({"collective": {"max_grace_s": 1.0}}, False, {"collective.max_grace_s": "collective.quorum"}),
        ({"collective": {"max_grace_s": 1.0, "quorum": 0.5}}, False, {}),
        ({"log": {"every_steps": 3}}, False, {"log.every_steps": "--log-to"}),
    ],
)
def test_options_without_effect_are_told_in_one_line(
    caplog: pytest.LogCaptureFixture, options: dict[str, object], holds_stage: bool, unused: dict[str, str]
) -> None:
    config = from_mapping(RunConfig, options)
    tell_unused(config, holds_stage=holds_stage)
    assert len(caplog.messages) == bool(unused)
    for name, needs in unused.items():
        assert name in caplog.text and f"of use with {needs}" in caplog.text
    assert unused_options(config, holds_stage=holds_stage).keys() == unused.keys()


def test_a_run_says_which_of_its_options_are_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--node-id", "a", "--store", str(tmp_path / "none"), "--no-api", "--set", f"state_dir={tmp_path}"]
    assert run([*line, "--set", "sparseloco.inner_steps=7", "--set", "bucket.cdn=https://x/y"]) == 1
    said = capsys.readouterr().err + caplog.text
    assert "set and without effect here: " in said
    assert "sparseloco.inner_steps (of use with strategy sparseloco)" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--node-id: expected a name for this node, found none"),
        (("--node-id", "a", "--strategy", "ddp"), "strategy ddp: expected engine torch"),
        (("--node-id", "a", "--engine", "torch"), "expected to be started by torchrun"),
        (("--node-id", "a", "--preset", "huge"), "preset: expected one of tiny, 15m"),
        (("--node-id", "a", "--device", "tpu"), "device: expected auto, cpu, cuda or cuda:N, found 'tpu'"),
        (("--node-id", "a", "--set", "inner"), "--set: expected name.name=value, found 'inner'"),
        (("--node-id", "a", "--compression", "zip"), "collective.compression: "),
        (("--node-id", "a", "--set", "data.sources.nowhere=1"), "nowhere"),
        (("--node-id", "a", "--holdout", "99"), "99 of each source are held out"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    places = ("--store", str(text_store()), "--checkpoint-dir", str(tmp_path / "checkpoints"), "--no-api")
    code = run([*places, "--preset", "tiny", "--max-steps", "1", *arguments])
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert said in errors
    assert not list(tmp_path.glob("checkpoints/*.pt"))
    assert run(["--lr", "fast"]) == run(["--no-such-option"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("address", ["foo", "/ip4/127.0.0.1/tcp/24001"])
@pytest.mark.parametrize(
    "process",
    [
        ("--node-id", "a"),
        ("--node-id", "driver-1", "--pipeline", "swarm", "--run", "RUN"),
        ("worker", "--stage", "head", "--run", "RUN"),
        ("seed",),
        ("swarm", "up", "--run", "RUN"),
    ],
)
def test_where_to_begin_is_checked_first(process, address, tmp_path, capsys):
    """There is no such store, nor would there be anything to read or to join: none of it is looked at."""
    file = tmp_path / "run.yaml"
    begin = f"discovery: {{initial_peers: [{address}]}}\n" if "up" in process else ""
    file.write_text(f"data: {{store: {tmp_path / 'none'}}}\nstate_dir: {tmp_path / 'state'}\n{begin}")
    options = [] if begin else ["--initial-peers", address]
    code = run([str(file) if part == "RUN" else part for part in process] + options)
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert errors.startswith("trainer: ")
    assert "initial_peers: expected " in errors
    assert repr(address) in errors
    assert errors.count("\n") == 1
    assert [found.name for found in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.slow
def test_help_and_version_do_not_wait_for_torch() -> None:
    look = "import sys; from trainer.run.cli.app import run; sys.exit(run(sys.argv[1:]) or 'torch' in sys.modules)"
    for arguments, said in (("--help", "--initial-peers"), ("--version", "trainer "), ("plot --help", "LOGDIR")):
        command = [sys.executable, "-c", look, *arguments.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


@pytest.mark.slow
def test_a_mistake_of_a_real_command_line_and_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    trainer = TrainerCommand(text_store(), tmp_path)
    done = trainer("--node-id", "a", "--set", "inner.warmup=1", expect=2)
    assert done.stderr == "trainer: inner.warmup: there is no such option; did you mean warmup_steps?\n"
    assert done.stdout == ""
    line = trainer.line("--node-id", "a", "--max-steps", "1000", "--json")
    done = finished(["bash", "-c", 'set -o pipefail; "$@" | head -n 2', "_", *line], trainer.environment(), 0, WAIT_S)
    assert len(done.stdout.splitlines()) == 2
    assert "cannot go on" not in done.stderr


def test_what_is_shown_of_steps_and_rounds_is_json_also_where_numbers_are_not_finite(capsys, monkeypatch):
    done = RoundReport(round_index=3, members=("a", "b"), dropped=(("c" * 64, "fell silent"),), completeness=0.75)
    failed = OuterResult(round_index=3, fragment=0, outer_step=4, committed=False, num_batches=5, waited_s=2.0)

    def shown(*, as_json: bool) -> tuple[str, str]:
        with training_display(RunConfig(max_steps=9), StopRequest(), as_json=as_json) as display:
            for step, loss in ((4, 2.0), (5, math.inf), (6, math.nan), (7, 1.25)):
                display.step(StepResult(step, loss, loss, 1e-3, 100, not math.isfinite(loss), 0.5))
            display.outer(replace(failed, committed=True, report=done))
            display.outer(replace(failed, error="nobody came"))
        return capsys.readouterr()

    def refused(name: str) -> float:
        raise ValueError(name)  # What most parsers do with NaN and Infinity.

    lines = [json.loads(line, parse_constant=refused) for line in shown(as_json=True)[0].splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [2.0, None, None, 1.25]
    made, lost = (line for line in lines if line["kind"] == "round")
    assert (made["completeness"], made["dropped"]) == (0.75, [["c" * 64, "fell silent"]])
    assert (lost["committed"], lost["error"], lost["members"]) == (False, "nobody came", [])
    output, errors = shown(as_json=False)
    assert output == "" and "outer step 4: 2 members, 75 % complete" in errors
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert all(text in shown(as_json=False)[1] for text in ("8/9", "loss 1.2500", "round 3 failed: nobody came"))
