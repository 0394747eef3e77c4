"""A monitor's history: adds up over lives, forgets in time, survives a kill, and refuses files that are not its own."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainerError, TrainerUsageError
from trainer.monitor.history import History, SeenLook, SeenReport, SeenRound

DAY_S = 86_400.0


def a_report(at: float = 100.0, peer: str = "a", life: str = "1", **changes: Any) -> SeenReport:
    content = {"at": at, "peer_id": peer, "node_id": f"node-{peer}", "incarnation": life, "role": "worker"}
    return SeenReport(**(content | {"stage": "head", "flops": 10.0} | changes))


def a_look(at: float = 100.0, **changes: Any) -> SeenLook:
    return SeenLook(**({"at": at, "step": 1, "tokens": 2, "loss": 3.0, "tokens_per_s": 4.0, "nodes": 5} | changes))


def a_round(index: int, at: float, peer: str = "a", error: str = "") -> SeenRound:
    times = {"completeness": 1.0, "seconds": 3.0, "agree_s": 1.0, "reduce_s": 1.5, "vote_s": 0.5}
    return SeenRound(
        stage="head", round_index=index, peer_id=peer, at=at, members=2, sent_bytes=9, error=error, **times
    )


LIVES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.integers(0, 10**9), st.none() | st.integers(0, 10**9)),
    max_size=40,
)


@given(LIVES)
def test_what_a_node_did_is_the_most_of_each_life_added_up(seen: list[tuple[str, str, int, int | None]]) -> None:
    with History(None, "run") as history:
        for at, (peer, life, flops, confirmed) in enumerate(seen):
            confirmed_flops = None if confirmed is None else float(confirmed)
            one = a_report(float(at), peer, life, flops=float(flops), confirmed_flops=confirmed_flops)
            history.add_reports([one, one], [])
        found = history.contributions()
    for peer in {it[0] for it in seen}:
        lives = {it[1] for it in seen if it[0] == peer}
        most = [max(it[2] for it in seen if it[:2] == (peer, life)) for life in lives]
        known = [
            max(mine)
            for life in lives
            if (mine := [it[3] for it in seen if it[:2] == (peer, life) and it[3] is not None])
        ]
        assert found[peer].flops == sum(most)
        assert found[peer].confirmed_flops == (sum(known) if known else None)


def test_what_is_old_goes_and_contributions_stay(tmp_path: Path) -> None:
    now = [0.0]
    with History(tmp_path / "db", "run", retention_s=10 * DAY_S, clock=lambda: now[0]) as history:
        for day in range(30):
            now[0] = day * DAY_S
            history.add_reports([a_report(now[0], flops=float(day))], [a_round(day, now[0])])
            history.add_look(a_look(now[0]), [])
        rows = history.num_rows()
        assert rows["contribution"] == 1
        assert all(10 <= rows[name] <= 12 for name in ("report", "round", "look"))
        assert history.contributions()["a"].flops == 29.0


def test_rows_are_bounded_whatever_their_age(tmp_path: Path) -> None:
    now = [1e6]
    with History(tmp_path / "db", "run", max_rows=50, clock=lambda: now[0]) as history:
        for number in range(300):
            now[0] += 700.0
            history.add_reports([a_report(now[0])], [a_round(number, now[0])])
            history.add_look(a_look(now[0]), [])
        assert all(history.num_rows()[name] <= 51 for name in ("report", "round", "look"))
        assert [it.round_index for it in history.rounds(3)] == [299, 298, 297]


def test_alarms_stand_from_when_they_were_first_raised_until_they_are_not() -> None:
    with History(None, "run") as history:
        assert history.add_look(a_look(10.0), [("clock", "a", "one")]) == {("clock", "a"): 10.0}
        both = history.add_look(a_look(20.0), [("clock", "a", "two"), ("quiet", "b", "x")])
        assert both == {("clock", "a"): 10.0, ("quiet", "b"): 20.0}
        history.add_look(a_look(30.0), [])
        assert history.add_look(a_look(40.0), [("clock", "a", "again")]) == {("clock", "a"): 40.0}
        assert history.num_rows()["alarm"] == 3


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "db"
    with History(path, "run") as history:
        history.add_reports([a_report()], [])
        for at in range(5):
            history.add_look(a_look(float(at), loss=float(at)), [])
    with History(path, "run") as history:
        assert history.contributions()["a"].flops == 10.0
        assert history.losses(3) == [2.0, 3.0, 4.0]
        assert [look.at for look in history.looks(3.0)] == [3.0, 4.0]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for name, content in (("text", b"no database, but quite some text" * 100), ("other", b"")):
        (tmp_path / name).write_bytes(content)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE mine (x)")
    with sqlite3.connect(tmp_path / "newer") as newer:
        newer.execute("PRAGMA user_version=99")
    other.close()
    newer.close()
    with History(tmp_path / "run", "run"):
        pass
    for name, run_id in (("text", "run"), ("other", "run"), ("newer", "run"), ("run", "another")):
        with pytest.raises(TrainerUsageError, match="--db"), History(tmp_path / name, run_id):
            pass


def test_one_monitor_writes_at_a_time(tmp_path: Path) -> None:
    first, second = History(tmp_path / "db", "run"), History(tmp_path / "db", "run")
    with first, pytest.raises(TrainerUsageError, match="another one"), second:
        pass
    with History(tmp_path / "db", "run"):
        pass


_KILLED = """
import sys
from pathlib import Path
from tests.trainer.monitor.test_history import a_look, a_report
from trainer.monitor.history import History
with History(Path(sys.argv[1]), "run") as history:
    for number in range(100_000):
        history.add_reports([a_report(float(number), peer, flops=float(number)) for peer in "abcdefgh"], [])
        print(number, flush=True)
"""


def test_a_kill_leaves_whole_looks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "db")]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], text=True)
    assert writer.stdout is not None
    written = -1
    for line in writer.stdout:
        written = int(line)
        if written >= 20:
            break
    os.kill(writer.pid, signal.SIGKILL)
    writer.stdout.close()
    writer.wait(30)
    with History(tmp_path / "db", "run") as history:
        flops = {it.flops for it in history.contributions().values()}
    assert len(flops) == 1
    assert flops.pop() >= written


def test_sums_of_absurd_claims_neither_overflow_nor_hide_others() -> None:
    with History(None, "run") as history:
        lives = [a_report(float(at), "liar", f"{at}", flops=9e29, tokens=2**53 - 1) for at in range(1_100)]
        history.add_reports([*lives, a_report(peer="honest", tokens=7)], [])
        found = history.contributions()
        assert found["liar"].tokens == 2**63 - 1
        assert found["honest"].tokens == 7


def test_a_file_that_is_damaged_while_it_is_used_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with History(path, "run") as history:
        for at in range(50):
            history.add_reports([a_report(float(at), f"{at}")], [a_round(at, float(at))])
    with History(path, "run") as history:
        body = bytearray(path.read_bytes())
        body[4096:] = b"\xff" * (len(body) - 4096)
        path.write_bytes(body)
        with pytest.raises(TrainerError, match=r"--db .*cannot be (read|written)") as told:
            for _ in range(3):
                history.add_reports([a_report(1000.0)], [a_round(1, 1.0)])
                history.add_look(a_look(), [])
                history.contributions()
                history.rounds(1024)
        assert "\n" not in str(told.value)


def test_a_full_disk_is_told_in_a_line_and_leaves_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with History(path, "run") as history:
        history.add_reports([a_report()], [])
        assert history._file is not None
        pages = history._file.execute("PRAGMA page_count").fetchone()[0]
        history._file.execute(f"PRAGMA max_page_count={pages}")  # As a full disk does, sqlite refuses further pages.
        with pytest.raises(TrainerError, match="cannot be written: database or disk is full"):
            for at in range(1_000):
                history.add_reports([a_report(float(at), f"{at:01000}")], [])
        assert history.contributions()["a"].flops == 10.0


def test_a_file_that_names_no_run_is_refused(tmp_path: Path) -> None:
    with History(tmp_path / "db", "run"):
        pass
    with sqlite3.connect(tmp_path / "db") as file:
        file.execute("DELETE FROM run")
    file.close()
    with pytest.raises(TrainerUsageError, match="found that of none"), History(tmp_path / "db", "run"):
        pass
