"""What a node keeps for its page: there after a restart, bounded, and never in the way of training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.observing import Announced, Report, Step
from tests.support.shown_pages import shown_node
from tests.support.waiting import wait_until
from trainer.monitor.history import History
from trainer.monitor.pages.course import CourseRange
from trainer.monitor.pages.node_history import history_path


def train(node, first: int, last: int) -> None:
    for step in range(first, last):
        node.observer.step(Step(step=step, loss=9.0 - step / 100, num_tokens=64), num_tokens=64 * (step + 1))


def test_curves_rounds_and_events_are_there_after_a_restart(tmp_path: Path):
    path = history_path(tmp_path, "gpu/7")
    with shown_node(path) as node:
        train(node, 0, 200)
        node.observer.round(Report(dropped=(("c" * 64, "late: no part"),)), outer_step=1, state_digest="d")
        node.observer.round_failed(1, "too few members")
        node.observer.event("withdrew", reason="its loss is far above the others'")
        node.tracker.peers([Announced("a" * 64, "gpu-8")])
        wait_until(lambda: node.page.course(CourseRange()).curves[0].who == "run", "a look at the run")
        before = node.page.course(CourseRange())
    with shown_node(path) as node:
        after = node.page.course(CourseRange())
        assert after.rounds == before.rounds and len(after.rounds) == 2
        own = {
            name: next(it for it in it.curves if (it.who, it.what) == ("self", "loss"))
            for name, it in {"before": before, "after": after}.items()
        }
        assert own["after"] == own["before"] and len(own["after"].x) == 200
        view = node.page.view()
        assert [(it.round_index, it.error) for it in view.rounds] == [(1, "too few members"), (0, "")]
        assert view.rounds[1].left_out == (("cccccccccccc", "late: no part"),)
        assert [it.kind for it in view.incidents] == ["withdrew", "round failed"]
        assert view.step == 200 and view.tokens == 12_800
        train(node, 150, 160)  # From an older checkpoint: what was done after it is done again.
        again = node.page.course(CourseRange())
        assert again.end == 160
    with shown_node(path) as node:
        assert node.page.course(CourseRange()).end == 160


@pytest.mark.parametrize("spoil", ["locked", "other run", "no database", "a folder"])
def test_a_file_that_cannot_be_used_costs_the_curve_and_not_the_run(tmp_path: Path, spoil, caplog):
    path = tmp_path / "page.sqlite"
    other = History(path, "run-1" if spoil == "locked" else "run-2")
    if spoil == "no database":
        path.write_bytes(b"not sqlite" * 1_000)
    elif spoil == "a folder":
        path.mkdir()
    else:
        other.__enter__()
        if spoil == "other run":
            other.close()
    with shown_node(path) as node:
        train(node, 0, 120)
        assert node.page.course(CourseRange()).end == 120
        assert node.page.view().verdict == "verified"
    other.close()
    assert sum("keeps none" in it.message for it in caplog.records) == 1


def test_a_disk_that_fails_is_said_once(tmp_path: Path, caplog):
    with shown_node(tmp_path / "page.sqlite") as node:
        train(node, 0, 50)
        node.history._file.execute("PRAGMA query_only=1")
        wait_until(lambda: any("cannot be written" in it.message for it in caplog.records), "a warning")
        train(node, 50, 100)
        assert node.page.course(CourseRange()).end == 100
    assert sum("cannot be written" in it.message for it in caplog.records) == 1


def test_a_node_without_a_step_has_no_curve_and_no_verdict():
    with shown_node(max_steps=500) as node:
        view = node.page.view()
        assert (view.verdict, view.step, view.budget, view.rounds) == ("unknown", None, None, ())
        assert node.page.course(CourseRange()).curves == ()
        node.observer.step(Step(step=0, loss=math.nan, skipped=True))
        assert node.page.course(CourseRange()).begin == 1


def test_the_budget_tells_when_it_will_be_used_up():
    with shown_node(max_steps=500) as node:
        train(node, 0, 100)
        budget = node.page.view().budget
        assert budget is not None and (budget.done, budget.limit, budget.unit) == (100, 500, "steps")
        assert budget.eta_s is not None and budget.eta_s >= 0
