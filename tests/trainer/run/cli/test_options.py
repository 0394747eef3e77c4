"""The command line: what wins over what, what is said of a line that makes no sense, and what is shown of a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import ROOT, WAIT_S, TrainerCommand, finished
from trainer.inner import StepResult
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.run.cli.app import run
from trainer.run.cli.displays import training_display
from trainer.run.cli.train import config_of
from trainer.run.config import RunConfig
from trainer.run.node.stopping import StopRequest

Captured = pytest.CaptureFixture[str]


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--node-id: expected a name for this node, found none"),
        (("--node-id", "a", "--strategy", "ddp"), "strategy ddp: expected engine torch"),
        (("--node-id", "a", "--engine", "torch"), "expected to be started by torchrun"),
        (("--node-id", "a", "--engine", "mpi"), "engine: input should be 'p2p' or 'torch', found 'mpi'"),
        (("--node-id", "a", "--preset", "huge"), "preset: expected one of tiny, 15m"),
        (("--node-id", "a", "--routing", "star"), "routing: input should be 'hub' or 'chain', found 'star'"),
        (("--node-id", "a", "--device", "tpu"), "device: expected auto, cpu, cuda or cuda:N, found 'tpu'"),
        (("--node-id", "a", "--set", "inner"), "--set: expected name.name=value, found 'inner'"),
        (("--node-id", "a", "--config", "none.yaml"), "none.yaml: cannot be read: No such file or directory"),
        (("--node-id", "a", "--rule", "vote"), "rule.rule: "),
        (("--node-id", "a", "--compression", "zip"), "collective.compression: "),
        (("--node-id", "a", "--set", "data.cache_bytes=much"), "much"),
        (("--node-id", "a", "--set", "data.sources.nowhere=1"), "nowhere"),
        (("--node-id", "a", "--holdout", "99"), "99 of each source are held out"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_where_to_begin_is_checked_first(
    process: tuple[str, ...], address: str, tmp_path: Path, capsys: Captured
) -> None:
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


def step(index: int, loss: float = 2.0, *, skipped: bool = False) -> StepResult:
    return StepResult(index, loss, loss, 1e-3, 100, skipped, 0.5)


def outer(*, failed: bool = False) -> OuterResult:
    report = RoundReport(
        round_index=3, members=("a", "b"), dropped=(("c" * 64, "fell silent"),), completeness=0.75, seconds=1.5,
        sent_bytes=2_000_000, note="no robust rule among so few",
    )  # fmt: skip
    return OuterResult(
        round_index=3, fragment=0, outer_step=4, committed=not failed, num_batches=5, waited_s=2.0,
        report=None if failed else report, error="nobody came" if failed else "",
    )  # fmt: skip


def said(capsys: Captured, *, as_json: bool, is_first: bool = True) -> tuple[str, str]:
    with training_display(RunConfig(max_steps=9), StopRequest(), as_json=as_json, is_first=is_first) as line:
        line.step(step(4))
        line.step(step(5, math.inf, skipped=True))
        line.step(step(6, math.nan, skipped=True))
        line.outer(outer())
        line.outer(outer(failed=True))
        line.step(step(7))
        line.step(step(8, 1.25))
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def test_json_lines_are_json_also_where_numbers_are_not_finite(capsys: Captured) -> None:
    def refused(name: str) -> float:
        raise ValueError(name)  # What most parsers do with NaN and Infinity.

    output, errors = said(capsys, as_json=True)
    lines = [json.loads(line, parse_constant=refused) for line in output.splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [2.0, None, None, 2.0, 1.25]
    done, failed = (line for line in lines if line["kind"] == "round")
    assert (done["completeness"], done["dropped"], done["seconds"]) == (0.75, [["c" * 64, "fell silent"]], 1.5)
    assert (failed["committed"], failed["error"], failed["members"]) == (False, "nobody came", [])
    assert errors == ""


def test_plain_lines_tell_first_and_last_step_and_every_round(capsys: Captured) -> None:
    output, errors = said(capsys, as_json=False)
    assert output == ""
    first, done, failed, last = errors.splitlines()
    assert first == "step 5  loss 2.0000  lr 1.00e-03  |g| 2.00  200 tokens/s"
    assert done.startswith("outer step 4: 2 members, 75 % complete, 1.50 s, 2.0 MB out, 0.0 MB in; cccccccc left out:")
    assert done.endswith("fell silent; no robust rule among so few")
    assert failed == "outer step 4: round 3 failed: nobody came"
    assert last.startswith("step 9  loss 1.2500")


def test_a_terminal_has_a_bar_and_one_rank_speaks_for_all(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(capsys, as_json=True, is_first=False) == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, errors = said(capsys, as_json=False)
    assert all(text in errors for text in ("9/9", "loss 1.2500", "round 3 failed: nobody came"))
