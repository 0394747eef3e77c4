"""What a person or a program reads of steps and rounds as they happen."""

from __future__ import annotations

import json
import math
import sys

import pytest

from trainer.inner import StepResult
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.run.cli.displays import training_display
from trainer.run.config import RunConfig
from trainer.run.node.stopping import StopRequest


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


def said(capsys: pytest.CaptureFixture[str], *, as_json: bool, is_first: bool = True) -> tuple[str, str]:
    with training_display(RunConfig(max_steps=9), StopRequest(), as_json=as_json, is_first=is_first) as line:
        line.step(step(4))
        line.step(step(5, math.inf, skipped=True))
        line.step(step(6, math.nan, skipped=True))
        line.outer(outer())
        line.outer(outer(failed=True))
        line.step(step(7))
        line.step(step(8, 1.25))
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def test_json_lines_are_json_also_where_numbers_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: str) -> float:
        raise ValueError(name)  # What most parsers do with NaN and Infinity.

    output, errors = said(capsys, as_json=True)
    lines = [json.loads(line, parse_constant=refused) for line in output.splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [2.0, None, None, 2.0, 1.25]
    done, failed = (line for line in lines if line["kind"] == "round")
    assert (done["completeness"], done["dropped"], done["seconds"]) == (0.75, [["c" * 64, "fell silent"]], 1.5)
    assert (failed["committed"], failed["error"], failed["members"]) == (False, "nobody came", [])
    assert errors == ""


def test_plain_lines_tell_first_and_last_step_and_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    output, errors = said(capsys, as_json=False)
    assert output == ""
    first, done, failed, last = errors.splitlines()
    assert first == "step 5  loss 2.0000  lr 1.00e-03  |g| 2.00  200 tokens/s"
    assert done.startswith("outer step 4: 2 members, 75 % complete, 1.50 s, 2.0 MB out, 0.0 MB in; cccccccc left out:")
    assert done.endswith("fell silent; no robust rule among so few")
    assert failed == "outer step 4: round 3 failed: nobody came"
    assert last.startswith("step 9  loss 1.2500")


def test_a_terminal_has_a_bar_and_one_rank_speaks_for_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capsys, as_json=True, is_first=False) == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, errors = said(capsys, as_json=False)
    assert all(text in errors for text in ("9/9", "loss 1.2500", "round 3 failed: nobody came"))
