from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.stages.naming import (
    StageName,
    file_name,
    format_time_us,
    named_files,
    parse_time,
    run_folder,
    stage_folder,
    time_us,
)
from trainer.errors import TrainerUsageError

_TIMES = st.integers(0, 4_000_000_000 * 1_000_000)


@given(_TIMES, _TIMES)
def test_a_time_read_off_a_name_is_that_time_and_names_sort_as_times_do(one: int, other: int) -> None:
    assert parse_time(format_time_us(one), now_us=-1) == one
    assert (file_name(one, "b") < file_name(other, "b")) == (one < other)


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("now", 7),
        ("1970-01-01T00:10", 600_000_000),
        ("1970-01-01 00:10:00.000001+00:00", 600_000_001),
        ("1970-01-01T02:10+02:00", 600_000_000),
        ("1970-01-02", 86_400_000_000),
    ],
)
def test_times_as_people_write_them(text: str, us: int) -> None:
    assert parse_time(text, now_us=7) == us


def test_what_is_no_time_and_names_that_would_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for text in ("", "yesterday", "12:00", "2026-13-01"):
        with pytest.raises(TrainerUsageError, match="expected a time such as"):
            parse_time(text, now_us=0)
    for run_id in ("..", "a/b", "", ".hidden"):
        with pytest.raises(TrainerUsageError, match="run_id"):
            run_folder(tmp_path, run_id)
    for stage in ("body", "body-0", "../head", "HEAD"):
        with pytest.raises(TrainerUsageError, match="stage"):
            stage_folder(tmp_path, "run", stage)
    for who in ("", "a/b", ".a", "x" * 65, "*"):
        with pytest.raises(TrainerUsageError, match="who"):
            file_name(0, who)


def test_files_are_found_by_their_names_alone(tmp_path: Path) -> None:
    ours = {
        "head": [file_name(time_us(600), "head.0.42"), file_name(time_us(600), "head.0.43")],
        "body-12": [file_name(time_us(1), "x-y_z")],
    }
    others = [".19700101T000000.000000Z-w.pt.tmp", "19701301T000000.000000Z-w.pt", "19700101T000000Z-w.pt", "notes"]
    for stage in ("head", "body-12", "set-aside", "body-0"):
        folder = tmp_path / "run" / stage
        folder.mkdir(parents=True)
        for name in ours.get(stage, ours["head"]) + others:
            (folder / name).touch()

    found = list(named_files(tmp_path, "run"))

    assert [(each.stage, each.path.name) for each in found] == [
        (stage, name) for stage in ("body-12", "head") for name in ours[stage]
    ]
    assert found[1] == StageName(tmp_path / "run" / "head" / ours["head"][0], "head", 600_000_000, "head.0.42")
    assert list(named_files(tmp_path, "another")) == []
