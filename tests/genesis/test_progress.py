"""Percentages, the time left on a made-up clock, lines of any width, and how far reading is in every kind of input."""

from __future__ import annotations

import gzip
import json
import logging
import random
import threading
import time

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from genesis.populate.progress import InputPositions, LearnProgress, Limits, PopulateProgress
from genesis.progress import (
    CountProgress,
    ProgressState,
    TimeLeft,
    bar_format,
    format_percent,
    line_interval_s,
    showing_progress,
    terminal_columns,
)
from genesis.sources import read_batches, resolve, tasks
from genesis.tokenizer.learning import merges_told
from manifests import Cursor, SourceSpec
from tests.support.documents import documents, write_json_lines, write_parquet


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "0.0 %"), (0.3729, "37.2 %"), (0.99999, "99.9 %"), (1, "100 %"), (1.5, "100 %"), (-0.1, "0.0 %")],
)
def test_percentages_are_rounded_down_so_that_100_is_all(fraction, text):
    assert format_percent(fraction) == text


def test_the_time_left_is_that_of_the_end_which_comes_first():
    left = TimeLeft(1000.0, 300.0, None)
    assert left.nearest(0.0) is None
    for second in range(11):
        left.observe(100.0 + second, 10.0 * second, 5.0 * second, 7.0 * second)
    assert left.nearest(110.0) == (1, pytest.approx((300 - 50) / 5))
    input_first = TimeLeft(200.0, 500_000.0)
    for second in range(11):
        input_first.observe(float(second), 10.0 * second, second)
    assert input_first.seconds(10.0) == pytest.approx(10.0)


@given(speed=st.floats(0.01, 1e9), step_s=st.floats(0.05, 30.0), total=st.integers(10, 10**13))
def test_at_a_steady_speed_the_time_left_falls_with_the_clock_and_is_exact(speed, step_s, total):
    left, now_s, seen = TimeLeft(float(total)), 1000.0, []
    for _ in range(200):
        done = (now_s - 1000.0) * speed
        if done >= total:
            break
        left.observe(now_s, done)
        seconds = left.seconds(now_s)
        if seconds is not None:
            assert seconds == pytest.approx((total - done) / speed, rel=1e-6, abs=1e-6)
            seen.append(now_s + seconds)
        now_s += step_s
    assert not seen or max(seen) - min(seen) <= 1e-6 * max(seen) + 1e-3


def test_a_change_of_speed_counts_in_full_after_a_minute_and_a_stall_makes_it_longer():
    left, done = TimeLeft(10_000.0), 0.0
    for second in range(300):
        done += 50.0 if second < 100 else 10.0
        left.observe(float(second), done)
    assert left.seconds(299.0) == pytest.approx((10_000 - done) / 10, rel=0.05)
    assert left.seconds(399.0) > 2 * left.seconds(299.0)


def test_a_counter_at_its_end_leaves_no_time_and_one_that_stands_says_nothing():
    left = TimeLeft(100.0, 50.0)
    left.observe(0.0, 0.0, 50.0)
    left.observe(5.0, 0.0, 50.0)
    assert left.nearest(5.0) == (1, 0.0)
    standing = TimeLeft(100.0)
    standing.observe(0.0, 1.0)
    standing.observe(5.0, 1.0)
    assert standing.seconds(9.0) is None


FACTS = ("4 min 05 s left", "7 of 12 shards", "20.1 MB/s", "4.51 M tokens/s")


@given(columns=st.integers(1, 300), fraction=st.none() | st.floats(0, 1), number=st.integers(0, 4))
def test_a_line_fits_any_terminal(columns, fraction, number):
    line = bar_format("fine{web}-edu", ProgressState(fraction, FACTS[:number]), columns)
    bar = max(columns - len(line.format(bar="")), 0)
    assert len(line.format(bar="#" * bar)) == max(columns, 1) or "{bar}" not in line
    assert "{bar}" not in line or bar >= 10
    assert len(line.format(bar="")) <= columns


def test_a_narrow_line_keeps_what_matters():
    state = ProgressState(0.3729, FACTS)
    wide = bar_format("fineweb-edu", state, 120)
    assert wide == "fineweb-edu 37.2 % {bar} 4 min 05 s left, 7 of 12 shards, 20.1 MB/s, 4.51 M tokens/s"
    assert bar_format("fineweb-edu", state, 60) == "fineweb-edu 37.2 % {bar} 4 min 05 s left"
    assert bar_format("fineweb-edu", state, 38) == "fineweb-edu 37.2 % {bar}"
    assert bar_format("fineweb-edu", state, 20) == "fineweb-edu 37.2 %"
    assert bar_format("fineweb-edu", state, 12) == "37.2 %"


def test_columns_can_make_a_terminal_narrower(monkeypatch):
    monkeypatch.setenv("COLUMNS", "33")
    assert terminal_columns() == 33
    for unusable in ("0", "-3", "wide", ""):
        monkeypatch.setenv("COLUMNS", unusable)
        assert terminal_columns() >= 1


def test_elsewhere_there_are_lines_and_the_last_tells_the_end(monkeypatch, caplog):
    monkeypatch.setenv("GENESIS_PROGRESS_INTERVAL_S", "0.1")
    progress = CountProgress(4, lambda done: f"{done} of 4 shards")
    log = logging.getLogger("genesis.test")
    with caplog.at_level(logging.INFO, "genesis.test"), showing_progress("verifying", progress.state, log):
        for done in range(5):
            progress.update(done)
            time.sleep(0.12)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == "verifying: 100 %, 4 of 4 shards"
    assert 3 <= len(lines) <= 10
    caplog.clear()
    with caplog.at_level(logging.WARNING, "genesis.test"), showing_progress("verifying", progress.state, log):
        time.sleep(0.3)
        assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert caplog.records == []


@pytest.mark.parametrize(("value", "seconds"), [("", 10), ("x", 10), ("nan", 10), ("-1", 10), ("2.5", 2.5)])
def test_the_interval_of_lines(monkeypatch, value, seconds):
    monkeypatch.setenv("GENESIS_PROGRESS_INTERVAL_S", value)
    assert line_interval_s() == seconds


def write_input(folder, kind):
    """Files of one kind, of several tasks where it can be."""
    texts = documents(seed=3, count=400)
    if kind == "parquet":
        return [write_parquet(folder / f"{number}.parquet", texts[number::2], 40) for number in range(2)]
    if kind == "txt":
        paths = [folder / f"{number}.txt" for number in range(40)]
        for number, path in enumerate(paths):
            path.write_text("".join(texts[number::40]) * 40, encoding="utf-8")
        return [*paths, *_empty(folder / "empty.txt")]
    noise = random.Random(7)
    lines = "".join(json.dumps({"text": noise.randbytes(6_000).hex()}) + "\n" for _ in range(1_200)).encode()
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines)
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    else:
        (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    return [next(folder.glob("a.jsonl*")), write_json_lines(folder / "b.jsonl", texts[:3])]


def _empty(path):
    path.write_bytes(b"")
    return [path]


KINDS = ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_from_nothing_to_all_stored_bytes(kind, tmp_path):
    plan = resolve(SourceSpec(name="s"), [str(path) for path in write_input(tmp_path, kind)])
    positions = InputPositions.of(plan)
    assert positions.total_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    seen = [0]
    for task in tasks(plan):
        row = task.first_row
        for batch in read_batches(task):
            seen += [positions.before(task, row), positions.before(task, batch.end_row)]
            row = batch.end_row
    assert seen == sorted(seen)
    assert len(set(seen)) >= 4
    assert seen[-1] == positions.total_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_cursor_is_where_it_was(kind, tmp_path):
    plan = resolve(SourceSpec(name="s"), [str(path) for path in write_input(tmp_path, kind)])
    positions = InputPositions.of(plan)
    all_tasks = list(tasks(plan))
    for task in all_tasks[:: max(len(all_tasks) // 7, 1)]:
        rows = [batch.end_row for batch in read_batches(task)]
        cursor = task.cursor(rows[0], plan)
        there = positions.before(task, rows[0])
        assert positions.at_cursor(cursor) <= there
        following = next(tasks(plan, cursor), None)
        if following is not None:
            # Lines are told apart by pieces of 64 KiB of the file, all else exactly.
            assert abs(positions.before(following, following.first_row) - there) <= (1 << 17 if "jsonl" in kind else 0)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


def populate_progress(tmp_path, clock, read_bytes=0, **limits):
    plan = resolve(SourceSpec(name="s"), [str(path) for path in write_input(tmp_path, "jsonl")])
    positions = InputPositions.of(plan)
    return PopulateProgress("s", positions, Limits(**limits), read_bytes, clock), positions.total_bytes


def feed(progress, clock, begin, end, tokens_a_byte=0.3):
    """Reads a share of the input in steps of a second, and fills and commits a shard a step."""
    total = progress.positions.total_bytes
    states = []
    progress.reached(int(begin * total))
    for step in range(1, 21):
        clock.now_s += 1.0
        read = int(total * (begin + (end - begin) * step / 20))
        num_bytes = read - progress.read_bytes
        progress.encoded(int(num_bytes * tokens_a_byte), num_bytes, 10, read)
        progress.filled(read)
        states.append(progress.state())
    return states


def test_a_target_beyond_the_input_promises_nothing(tmp_path):
    """298 of 500,000 shards: the input ends first, and that is the time left."""
    clock = Clock()
    progress, _ = populate_progress(tmp_path, clock, shards=500_000, shard_tokens=2_500_000)
    last = feed(progress, clock, 0.0, 0.5)[-1]
    assert last.fraction == pytest.approx(0.5, abs=0.001)
    assert last.facts[0] == "20 s left"
    assert last.facts[1] == "0 shards"
    progress.ended()
    assert progress.state().fraction == 1.0
    assert "left" not in progress.state().text()


def test_a_limit_within_the_input_is_the_end_that_counts(tmp_path):
    clock = Clock()
    progress, total = populate_progress(tmp_path, clock, shards=12, shards_before=2, shard_tokens=100_000)
    rate = total * 0.1 / 20 * 0.3
    facts = feed(progress, clock, 0.0, 0.1)[-1].facts
    assert facts[0] == f"{round((1_000_000 - 20 * rate) / rate)} s left" or "min" in facts[0]
    assert facts[1] == "2 of 12 shards"
    progress, _ = populate_progress(tmp_path, clock, documents=1000, documents_before=100)
    facts = feed(progress, clock, 0.0, 0.1)[-1].facts
    assert facts[0] == "1 min 10 s left"
    assert "300 of 1,000 documents" in facts


def test_what_is_committed_is_told_apart_from_what_is_read(tmp_path):
    clock = Clock()
    progress, total = populate_progress(tmp_path, clock, read_bytes=1000)
    assert progress.read_after(0).read_bytes == progress.read_bytes == 1000
    feed(progress, clock, 0.2, 0.6)
    assert progress.read_after(0).read_bytes == 1000
    assert progress.read_after(20).read_bytes == pytest.approx(total * 0.6, abs=1)
    progress.committed(5, 500)
    assert progress.read_after(0).read_bytes == pytest.approx(total * 0.3, abs=1)
    assert progress.read_after(1).total_bytes == total
    progress.reached(10)
    assert progress.read_bytes == pytest.approx(total * 0.6, abs=1)
    progress.encoded(1, 1, 1, total + 99)
    assert progress.state().fraction == 1.0


def test_an_input_that_is_smaller_than_what_is_learned_from(tmp_path):
    """730 files of 10,000 documents: reading ends with the input."""
    clock = Clock()
    plan = resolve(SourceSpec(name="s"), [str(path) for path in write_input(tmp_path, "txt")])
    progress = LearnProgress("s", InputPositions.of(plan), 10_000, 300, clock)
    total = plan.size_bytes
    for step in range(11):
        progress.read(4, total * step // 20)
        clock.now_s += 1.0
    state = progress.state()
    assert state.fraction == pytest.approx(0.5, abs=0.01)
    assert state.facts[0] in ("10 s left", "11 s left")
    assert state.facts[1] == "44 of 10,000 documents"
    progress.all_read()
    assert progress.state() == ProgressState(None, ("counting the words of 44 documents",))
    progress.merged(0)
    clock.now_s += 2.0
    progress.merged(150)
    assert progress.state() == ProgressState(0.5, ("2 s left", "150 of 300 merges"))
    progress.merged(301)
    assert progress.state().fraction == 1.0


def test_an_empty_input_has_no_percent():
    progress = PopulateProgress("s", InputPositions({}, {}, 0), Limits())
    progress.ended()
    assert progress.state().fraction is None
    assert InputPositions({}, {}, 0).at_cursor(Cursor(file="gone", row=3)) == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"stage":"Compute merges","current":120,"total":500}', 120),
        ('{"stage":"Count pairs","current":120,"total":500}', None),
        ('{"stage":"Compute merges","current":120,"total":7}', None),
        ('{"stage":"Compute merges"}', None),
        ("{not json", None),
        ("[]", None),
        ("Traceback (most recent call last):", None),
    ],
)
def test_what_the_trainer_tells(line, told):
    assert merges_told(line.encode(), 200, 300) == told
