"""The log on a real disk: rotation, kills, a full disk, two writers."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests import canonical_json
from tests.support.observing import Report, Step
from trainer.errors import TrainerUsageError
from trainer.monitor import EventLog, read_events
from trainer.monitor.event_log import event_line

ROOT = Path(__file__).parents[3]
KILLED = """
import sys
from pathlib import Path
from tests.support.observing import Step
from trainer.monitor import EventLog
log = EventLog(Path(sys.argv[1]), "n", max_file_bytes=5_000, max_files=1_000).start()
step = 0
while True:
    log.step(Step(step=step))
    step += 1
    if step % 100 == 0:
        log.flush()
        print(step, flush=True)
"""


def numbers(path, name="number"):
    return [event.fields[name] for event in read_events(path) if name in event.fields]


def log_flushed(log, numbers_):
    for number in numbers_:
        log.event("some", number=number)
        log.flush()


def test_events_of_all_threads_come_in_their_order(tmp_path):
    with EventLog(tmp_path / "new" / "folder", "pod-1/0") as log:

        def work(thread):
            for number in range(500):
                log.event("some", thread=thread, number=number)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, "abc"))
        log.step(Step(step=9), loader_wait_s=0.5)
        log.round(Report(), outer_step=4, state_digest="ab")
    events = list(read_events(tmp_path / "new" / "folder"))
    for name in "abc":
        assert [event.fields["number"] for event in events if event.fields.get("thread") == name] == list(range(500))
    assert [event.kind for event in events[-2:]] == ["step", "round"]
    assert {event.node for event in events} == {"pod-1/0"}
    assert log.lost_events == 0


def test_flush_makes_events_readable_and_those_before_the_start_or_after_the_end_are_lost(tmp_path):
    log = EventLog(tmp_path, "n")
    log.event("before", number=0)
    with log:
        log.event("first", number=1)
        assert log.flush()
        assert numbers(log.path) == [1]
        log.event("second", number=2)
    log.close()
    log.event("after", number=3)
    assert numbers(tmp_path) == [1, 2]
    assert log.lost_events == 2


@pytest.mark.slow
def test_full_files_are_numbered_and_the_oldest_go(tmp_path):
    with EventLog(tmp_path, "n", max_file_bytes=5_000, max_files=4) as log:
        for number in range(1_000):
            log.event("some", number=number)
            if number % 10 == 0:
                log.flush()
    files = sorted(path.name for path in tmp_path.glob("events-*.jsonl"))
    assert (len(files), files[-1]) == (4, "events-n.jsonl")
    kept = numbers(tmp_path)
    assert kept == list(range(1_000 - len(kept), 1_000))
    assert 100 < len(kept) < 400


def test_nodes_with_like_names_do_not_read_each_others_files(tmp_path):
    for node in ("a", "a.000001", "a.b", "ä b"):
        with EventLog(tmp_path, node, max_file_bytes=1) as log:
            log_flushed(log, range(3))
    found = [(event.node, event.fields["number"]) for event in read_events(tmp_path)]
    assert sorted(found) == sorted((node, number) for node in ("a", "a.000001", "a.b", "ä b") for number in range(3))


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_loses_the_end_and_never_a_middle(tmp_path, seed):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            flushed = [int(process.stdout.readline()) for _ in range(4 + seed)][-1]
            time.sleep(0.001 * seed)
        finally:
            process.kill()
        told = process.stdout.read()
    flushed = max(flushed, *(int(line) for line in told.split("\n")[:-1]), 0)
    steps = numbers(tmp_path, "step")
    assert steps == list(range(len(steps)))
    assert len(steps) >= flushed
    assert len(list(tmp_path.glob("events-n.*.jsonl"))) > 1


def test_what_a_kill_left_of_a_line_is_cut_off_by_the_next_start(tmp_path, caplog):
    whole = b'{"kind":"some","node":"n","number":1,"time":"2026-11-20T17:32:03.000Z"}\n'
    (tmp_path / "events-n.jsonl").write_bytes(whole + b'{"kind":"some","no' + b"x" * 100_000)
    assert numbers(tmp_path) == [1]
    with EventLog(tmp_path, "n") as log:
        log.event("some", number=2)
    assert numbers(tmp_path) == [1, 2]
    assert not caplog.records
    assert log.path.read_bytes().startswith(whole)


def test_a_full_disk_costs_events_and_not_the_run(tmp_path, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(tmp_path, "n") as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_050, limits[1]))
        try:
            for number in range(400):
                log.event("some", number=number)
                if number % 7 == 0:
                    log.flush()
            assert log.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        lost = log.lost_events
        log.event("some", number=400)
    assert lost > 100
    assert caplog.text.count("cannot write events") == 1
    found = numbers(tmp_path)
    assert len(found) == 401 - lost
    assert found[-1] == 400
    assert [event.fields["events"] for event in read_events(tmp_path) if event.kind == "lost"] == [lost]
    for line in log.path.read_bytes().splitlines():
        json.loads(line)


def test_a_second_process_is_refused_and_another_name_is_not(tmp_path):
    with EventLog(tmp_path, "n"):
        with pytest.raises(TrainerUsageError, match=r"another process.*--node-id or --log-dir"):
            EventLog(tmp_path, "n").start()
        with EventLog(tmp_path, "m"):
            pass
    with EventLog(tmp_path, "n") as log:
        log.event("again", number=1)
    assert numbers(tmp_path) == [1]


def test_a_folder_that_cannot_be_and_no_log_are_usage_errors(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, name, option in (
        ("file/logs", "n", "--log-dir"),
        (".", "", "--node-id"),
        (".", "x" * 300, "--node-id"),
    ):
        with pytest.raises(TrainerUsageError, match=option):
            EventLog(tmp_path / folder, name).start()
    with pytest.raises(TrainerUsageError, match="--log-dir"):
        list(read_events(tmp_path / "nowhere"))
    assert list(read_events(tmp_path)) == []


def test_strange_lines_are_passed_over_with_one_warning(tmp_path, caplog):
    good = b'{"kind":"some","node":"n","number":%d,"time":"2026-11-20T17:32:03.000Z"}\n'
    strange = [b"", b"[]", b'{"kind":"x"}', b"\xff\xfe", b"[" * 100_000, b'{"kind":1,"node":"n","time":"x"}', good % 2]
    (tmp_path / "events-n.jsonl").write_bytes(good % 1 + b"\n".join(strange))
    assert numbers(tmp_path) == [1, 2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "6 lines" in caplog.text


def test_a_log_rotated_while_it_is_read_is_read_once(tmp_path):
    with EventLog(tmp_path, "n", max_file_bytes=1, max_files=100) as log:
        log_flushed(log, range(5))
        reading = read_events(tmp_path)
        found = [next(reading).fields["number"]]
        log_flushed(log, range(5, 8))
        found += [event.fields["number"] for event in reading if "number" in event.fields]
    assert found[:5] == list(range(5))
    assert len(set(found)) == len(found)


def test_a_disk_that_hangs_holds_up_nobody_and_what_did_not_fit_into_the_queue_is_logged(tmp_path, monkeypatch):
    entered, released, writers, real_write = threading.Event(), threading.Event(), [], os.write

    def slow_write(file, data):
        writers.append(threading.current_thread())
        entered.set()
        assert released.wait(30)
        return real_write(file, data)

    monkeypatch.setattr("trainer.monitor.event_log._MAX_WAITING", 50)
    with EventLog(tmp_path, "n") as log:
        monkeypatch.setattr("trainer.monitor.event_log.os.write", slow_write)
        log.event("some", number=0)
        assert entered.wait(30)
        for number in range(1, 101):
            log.event("some", number=number)
        assert not log.flush(timeout_s=0.05)
        released.set()
        assert log.flush(30)
        log.event("some", number=101)
    assert threading.current_thread() not in writers
    assert log.lost_events >= 50
    found = numbers(tmp_path)
    assert len(found) == 102 - log.lost_events
    assert sum(event.fields["events"] for event in read_events(tmp_path) if event.kind == "lost") == log.lost_events


def test_rotation_goes_on_after_it_failed_half_way(tmp_path, monkeypatch):
    real_open = os.open
    failing = [True]

    def full_open(path, *arguments, **options):
        if failing and str(path).endswith("events-n.jsonl"):
            failing.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, *arguments, **options)

    with EventLog(tmp_path, "n", max_file_bytes=1) as log:
        log_flushed(log, [0])
        monkeypatch.setattr("trainer.monitor.event_log.os.open", full_open)
        log_flushed(log, [1, 2, 3])
    assert numbers(tmp_path) == [0, 2, 3]
    assert log.lost_events == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.slow
@given(fields=st.dictionaries(st.text().filter(lambda name: name not in ("time", "node", "kind")), JSON))
def test_any_value_is_one_canonical_line(fields):
    line = event_line(1_790_000_000.1239, "gpu-7", "odd", fields)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    value = json.loads(line)
    assert line == canonical_json(value) + b"\n"
    assert value["time"] == "2026-09-21T14:13:20.123Z"
    assert (value["node"], value["kind"]) == ("gpu-7", "odd")


def test_numbers_that_json_has_not_are_strings_that_float_reads_and_other_things_their_text():
    @dataclass(frozen=True)
    class Verdict:
        who: str
        cosine: float

    class Level(IntEnum):
        HIGH = 3

    endless: list[object] = []
    endless.append(endless)
    expected = (
        (Path("/tmp/x"), "/tmp/x"),
        (Verdict("p", 0.25), {"who": "p", "cosine": 0.25}),
        ({"b", "a"}, ["a", "b"]),
        (b"ab", "b'ab'"),
        (Level.HIGH, 3),
        ("\ud800", "\\ud800"),
        ("x" * 100_000, "x" * 4_096 + "…"),
        ([math.nan, math.inf, -math.inf], ["NaN", "Infinity", "-Infinity"]),
        ([np.float32(0.5), np.int64(3)], [0.5, 3]),
    )
    for value, spelt in expected:
        assert json.loads(event_line(0, "n", "k", {"x": value}))["x"] == spelt
    assert "..." in event_line(0, "n", "k", {"x": endless}).decode()
    assert [str(float(text)) for text in ("NaN", "Infinity", "-Infinity")] == ["nan", "inf", "-inf"]
