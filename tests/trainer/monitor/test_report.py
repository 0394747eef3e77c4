"""Reports on runs: what they say of logs that were cut, mixed, repeated, hostile, or of an older release."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.observing import Report, Step
from trainer.errors import TrainerUsageError
from trainer.monitor import EventLog
from trainer.monitor.event_log import Event, event_line
from trainer.monitor.history import History, SeenLook, SeenReport
from trainer.monitor.report import RunReport, run_report
from trainer.monitor.report.model import ReportedIncident
from trainer.monitor.report.rounds import Rounds

T0 = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
START: dict[str, Any] = {
    "log_format": 1,
    "role": "node",
    "run_id": "blue",
    "peer_id": "a" * 64,
    "num_parameters": 7_000_000,
    "flops_per_token": 1_000,
    "peak": {"device": "CPU, fp32", "kind": "measured", "flops_per_s": 1e6},
    "versions": {"genesis": "0.1.0", "torch": "2.13.0"},
    "machine": {"host": "node-a", "cores": 8, "memory_bytes": 1 << 30, "devices": [{"name": "H200"}]},
    "options": {"inner": {"lr": 3e-4, "seq_len": 1024}, "seed": 7},
    "options_changed": ["inner.lr"],
}


class Log:
    """A node's log, a second between events."""

    def __init__(self, folder: Path, node: str = "gpu-1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._node, self.at = folder / f"events-{node.replace('.', '%2E')}.jsonl", node, T0

    def event(self, kind: str, after_s: float = 1.0, **fields: Any) -> Log:
        self.at += after_s
        with self.path.open("ab") as file:
            file.write(event_line(self.at, self._node, kind, fields))
        return self

    def raw(self, line: bytes) -> Log:
        with self.path.open("ab") as file:
            file.write(line)
        return self

    def steps(self, first: int, last: int, loss: Callable[[int], float] = lambda step: 5.0 - step / 100) -> Log:
        for step in range(first, last):
            fields = {"step": step, "loss": loss(step), "grad_norm": 1.0, "lr": 1e-3, "num_tokens": 100}
            self.event("step", **fields, skipped=False, seconds=0.5, loader_wait_s=0.1)
        return self


def incidents(report: RunReport, kind: str) -> list[ReportedIncident]:
    return [it for it in report.incidents if it.kind == kind]


def figure(report: RunReport, name: str) -> float | None:
    return next(it.value for it in report.figures if it.name == name)


def test_a_log_that_was_written_here(tmp_path: Path) -> None:
    with EventLog(tmp_path, "gpu-1") as log:
        log.event("start", **START)
        for step in range(20):
            log.step(Step(step=step, loss=4.0 - step / 10, num_tokens=100), loader_wait_s=0.01)
        log.round(Report(round_index=3, members=("a" * 64, "b" * 64)), outer_step=4, state_digest="d")
        log.event("round_failed", round_index=4, reason="nobody came")
        log.event("checkpoint", outcome="saved", step=20, seconds=0.5)
        log.event("held_out", step=20, loss=3.5, bits_per_byte=1.2, by_source={"wiki": {"loss": 3.25}})
        log.event("sample", step=20, prompt="The", text=" cat")
        log.event("shards", shards=[1, 2], num_shards=2)
        log.event("shards", shards=[2, 3], num_shards=2)
        log.event("end", outcome="ended", reason="")
    report = run_report([tmp_path])
    [node] = report.nodes
    assert (report.settings.run_id, report.title) == ("blue", "blue")
    assert (node.num_steps, node.num_tokens, node.rounds_shared, node.rounds_failed) == (20, 2_000, 1, 1)
    assert node.lowest_loss == pytest.approx(2.1) and node.lives[0].outcome == "ended"
    assert node.machine is not None and (node.machine.host, node.machine.devices) == ("node-a", ("H200",))
    assert node.mfu == pytest.approx(2_000 * 1_000 / (1e6 * 20 * 0.25))
    [done, failed] = report.rounds
    assert (done.first_index, done.members, done.agree_s, done.vote_s) == (3, ("gpu-1", "b" * 12), 0.2, 0.3)
    assert failed.errors == ("nobody came",) and failed.num_failed == 1
    assert [it.text for it in incidents(report, "failed-round")] == ["nobody came"]
    assert (report.held_out[0].loss, report.held_out[0].by_source) == (3.5, {"wiki": 3.25})
    assert (report.samples[0].prompt, report.samples[0].text) == ("The", " cat")
    assert (report.data.num_shards, report.data.num_rotations) == (3, 1)
    assert node.checkpoints.saved == 1 and node.checkpoints.last_step == 20
    options = {it.name: it for it in report.settings.options}
    assert options["inner.lr"].is_changed and not options["seed"].is_changed
    assert RunReport.model_validate_json(report.model_dump_json()) == report


def test_a_node_that_was_killed_and_went_back_counts_each_step_once(tmp_path: Path) -> None:
    log = Log(tmp_path).event("start", **START).steps(0, 130)
    log.event("start", after_s=600, **START, first_step=100).steps(100, 150, lambda _: 1.0).event(
        "end", outcome="ended"
    )
    report = run_report([tmp_path])
    [node] = report.nodes
    assert (node.num_steps, node.steps_repeated, node.num_tokens) == (150, 30, 15_000)
    assert [life.outcome for life in node.lives] == ["killed", "ended"]
    assert [(it.kind, it.count) for it in report.incidents] == [("death", 1), ("restart", 1)]
    assert "after 600 s, from step 100" in incidents(report, "restart")[0].text
    [curve] = report.loss_by_step.curves
    assert max(y for x, y in zip(curve.x, curve.y, strict=True) if x > 100) == pytest.approx(1.0)
    # The ten minutes between its lives are no part of its speed.
    assert node.tokens_per_s == pytest.approx(18_000 / 181, rel=0.02)


def test_a_log_of_a_release_without_starts_shows_restarts_by_the_steps(tmp_path: Path) -> None:
    Log(tmp_path).steps(0, 50).steps(40, 60)
    report = run_report([tmp_path])
    [node] = report.nodes
    assert (node.num_lives, node.num_steps, node.machine) == (2, 60, None)
    assert "from step 49 to 40" in incidents(report, "restart")[0].text
    assert any("a release that did not log" in note for note in report.notes)


def test_steps_done_again_beyond_what_is_held_are_reckoned(tmp_path: Path) -> None:
    Log(tmp_path).event("start", **START).steps(0, 6_000).event("start", **START).steps(1_000, 6_000)
    [node] = run_report([tmp_path]).nodes
    assert node.num_steps == 6_000 and node.num_tokens == pytest.approx(600_000, rel=0.01)


def test_what_is_cut_or_broken_costs_its_own_line_only(tmp_path: Path) -> None:
    log = Log(tmp_path).event("start", **START).steps(0, 10)
    for line in (b"", b"[]", b"\xff\xfe", b'{"kind":"step"}', b"[" * 100_000, b"x" * (10 << 20)):
        log.raw(line + b"\n")
    log.steps(10, 20).raw(b'{"kind":"step","no')
    assert run_report([tmp_path]).nodes[0].num_steps == 20


HOSTILE = ("<script>alert(1)</script>", "\u202eevil\x00\x1b[31m", "\ud800", "x" * 100_000, "💥" * 5_000, "")


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_strangers_are_cut_and_harmless(tmp_path: Path, text: str) -> None:
    log = Log(tmp_path).event("start", **{**START, "run_id": text, "stage": text, "options": {text: {text: text}}})
    log.steps(0, 3).event("withdrew", reason=text).event("sample", step=1, prompt=text, text=text)
    log.event("round", round_index=1, members=[text] * 1_000, dropped=[[text, text], 3, [text]], seconds=1)
    log.event("ban", worker=text, reason=text, seconds="x").event("checkpoint", outcome=text)
    report = run_report([tmp_path])
    dumped = report.model_dump_json()
    assert len(dumped) < 100_000
    assert not any(char in json.loads(dumped)["title"] for char in "\u202e\x00\x1b")
    assert "\\u202e" not in dumped and "\x1b" not in dumped and "\u202e" not in dumped


WRONG = (None, True, -1, 1e308, 2**80, "NaN", "Infinity", "x", [], {}, [[1]], {"a": {"b": 1}})
FIELDS = "step loss grad_norm num_tokens seconds loader_wait_s round_index members dropped completeness sent_bytes"
FIELDS += " received_bytes agree_s reduce_s vote_s outcome shards rows by_source bits_per_byte options machine versions"
FIELDS += " peak model first_step num_devices events outer_step settings skipped num_parameters flops_per_token"
KINDS = "step round round_failed checkpoint shards store vocabulary held_out sample end start lost"
KINDS += " ban withdrew adopted run_change"
EVENTS = st.tuples(
    st.sampled_from(KINDS.split()), st.dictionaries(st.sampled_from(FIELDS.split()), st.sampled_from(WRONG), max_size=8)
)


@given(events=st.lists(EVENTS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_log_breaks_a_report(tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = Log(folder).event("start", **START).steps(0, 2)
    for kind, fields in events:
        log.raw(json.dumps({"time": "2026-11-20T13:00:00Z", "node": "gpu-1", "kind": kind, **fields}).encode() + b"\n")
    log.steps(2, 4)
    report = run_report([folder])
    assert RunReport.model_validate_json(report.model_dump_json()).nodes[0].num_steps >= 2
    json.loads(report.model_dump_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_times_that_cannot_be_are_left_out_and_said(tmp_path: Path) -> None:
    log = Log(tmp_path).steps(0, 5)
    for year in ("1970", "9999"):
        log.raw(b'{"kind":"step","loss":1,"node":"gpu-1","step":99,"time":"%s-01-01T00:00:00Z"}\n' % year.encode())
    report = run_report([tmp_path])
    assert report.nodes[0].num_steps == 5
    assert report.left_out == ("2 events of a time before 2000 or in the future",)


def test_nodes_of_several_folders(tmp_path: Path) -> None:
    Log(tmp_path / "one", "gpu-10").event("start", **{**START, "options": {"inner": {"lr": 0.5}}}).steps(0, 30)
    Log(tmp_path / "one", "gpu-2").event("start", **START).steps(0, 30)
    Log(tmp_path / "two", "gpu-2").event("start", **START).steps(0, 30)
    report = run_report([tmp_path])
    assert [node.name for node in report.nodes] == ["gpu-2", "gpu-10", "two: gpu-2"]
    assert [curve.name for curve in report.loss_by_step.curves] == ["all nodes", "gpu-2", "gpu-10", "two: gpu-2"]
    lr = next(it for it in report.settings.options if it.name == "inner.lr")
    assert (lr.value, lr.differs) == ("0.0003", "gpu-10: 0.5")
    assert figure(report, "tokens") == 9_000


def test_the_tokens_of_a_swarm_are_the_drivers(tmp_path: Path) -> None:
    Log(tmp_path, "driver-1").event("start", **START | {"role": "driver"}).steps(0, 10)
    for stage in ("head", "tail"):
        log = Log(tmp_path, stage).event("start", **START | {"role": "worker", "stage": stage, "peer_id": "c" * 64})
        log.event("stage_status", status="serving", stage=stage, version=0).steps(0, 10, lambda _: float("nan"))
    log = Log(tmp_path, "driver-2").event("start", **START | {"role": "driver"}).steps(0, 10)
    log.event("ban", worker="tail.0.1", peer_id="c" * 64, stage="tail", seconds=30.0, reason="unavailable")
    for number in range(3):
        log.event("micro_batch", fate="lost", stage="tail", reason="unclear", micro_batch=f"0.{number}")
    report = run_report([tmp_path])
    assert figure(report, "tokens") == 2_000 and report.settings.num_parameters == 21_000_000
    assert {curve.name for curve in report.course_by_time.curves if curve.what == "speed"} == {
        "all nodes",
        "driver-1",
        "driver-2",
    }
    assert incidents(report, "ban")[0].text == "tail: no work for 30 s as tail.0.1: unavailable"
    assert [it.count for it in incidents(report, "lost-micro-batches")] == [3]


def test_many_rounds_share_rows() -> None:
    rounds = Rounds(max_rows=100)
    for index in range(1_000):
        kind = "round_failed" if index == 500 else "round"
        fields = {"round_index": index, "members": ["a", "b"], "seconds": 2.0, "sent_bytes": 10, "completeness": 1.0}
        rounds.add(Event(datetime.fromtimestamp(T0 + index, UTC), "n", kind, fields), "")
    rows = rounds.all({})
    assert len(rows) <= 100 and sum(row.num_rounds for row in rows) == 1_000
    assert sum(row.sent_bytes for row in rows) == 9_990 and sum(row.num_failed for row in rows) == 1
    assert {row.seconds for row in rows} == {2.0}


def test_a_spike_and_a_gap_survive_down_sampling(tmp_path: Path) -> None:
    Log(tmp_path).steps(0, 5_000, lambda step: 900.0 if step == 432 else float("nan") if step % 2 else 5.0)
    [curve] = run_report([tmp_path]).loss_by_step.curves
    assert curve.high is not None and max(curve.high) == 900.0 and len(curve.x) <= 600


def test_alike_incidents_are_one_and_too_many_are_counted(tmp_path: Path) -> None:
    log = Log(tmp_path).event("start", **START)
    for _ in range(50):
        log.event("round_failed", round_index=1, reason="timeout")
    for number in range(1_000):
        log.event("round_failed", round_index=2, reason=f"reason {number}")
    report = run_report([tmp_path])
    failed = incidents(report, "failed-round")
    assert failed[0].count == 50 and len(failed) == 300
    assert report.left_out == ("701 further incidents of the kind failed-round",)


def test_a_swarms_folder(tmp_path: Path) -> None:
    Log(tmp_path / "events", "head.1").event("start", **START).steps(0, 3)
    text = "--- 2026-11-20 12:00:00 python -m trainer worker\n12:00:01 INFO serves\n12:00:02 WARNING lost touch\n"
    (tmp_path / "head.1.log").write_text(text + "x" * 100_000 + "\ntrainer: the disk is full\n")
    (tmp_path / "notes.log").write_text("something else")
    with History(tmp_path / "blue.sqlite", "blue") as history:
        history.add_reports(
            [SeenReport(at=T0, peer_id="p", node_id="<b>", incarnation="1", role="worker", flops=5e15)], ()
        )
        for number in range(2_000):
            look = SeenLook(at=T0 + number, step=number, tokens=number, loss=4.0, tokens_per_s=10.0, nodes=3)
            history.add_look(look, [("clock", "head.1", "off by 40 s")] if 100 <= number < 200 else ())
    report = run_report([tmp_path])
    assert [(it.node, it.at, it.level, it.text) for it in report.log] == [
        ("head.1", "2026-11-20 12:00:02", "WARNING", "lost touch"),
        ("head.1", "2026-11-20 12:00:02", "ERROR", "the disk is full"),
    ]
    assert report.watched is not None and 300 <= len(report.watched.points) <= 601
    assert report.watched.contributions[0].pflops == 5.0
    [alarm] = incidents(report, "alarm")
    assert (alarm.node, alarm.text) == ("head.1", "clock: off by 40 s")
    assert [it.kind for it in report.read] == ["events", "process", "history"]


def test_a_history_alone(tmp_path: Path) -> None:
    with History(tmp_path / "blue.sqlite", "blue") as history:
        history.add_look(SeenLook(at=T0, step=1, tokens=1, loss=4.0, tokens_per_s=10.0, nodes=3), ())
    report = run_report([tmp_path / "blue.sqlite"])
    assert report.nodes == () and report.watched is not None and len(report.watched.points) == 1


def other_database(folder: Path) -> Path:
    path = folder / "other.sqlite"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE other (x)")
    file.close()
    return path


def nothing_there(folder: Path) -> Path:
    return folder / "gone"


def empty_folder(folder: Path) -> Path:
    return folder


def no_events(folder: Path) -> Path:
    (folder / "events-a.jsonl").write_bytes(b"not events\n")
    return folder


@pytest.mark.parametrize("make", [other_database, nothing_there, empty_folder, no_events])
def test_what_is_no_log_is_named(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(TrainerUsageError, match="expected"):
        run_report([make(tmp_path)])
