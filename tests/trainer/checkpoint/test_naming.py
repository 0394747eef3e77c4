"""Whose checkpoints they are, of when, and what they are called."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.file_lock import FileLock
from trainer.checkpoint.node import (
    checkpoint_path,
    former_wallet_id,
    kept_path,
    kept_paths,
    lock_path,
    take_over_former_names,
    wallet_id,
)
from trainer.checkpoint.stages.naming import file_name, format_time_us, parse_time, run_folder, stage_folder
from trainer.errors import CheckpointError, TrainerUsageError


@pytest.mark.slow
def test_the_wallet_follows_from_the_token_or_else_the_node_id() -> None:
    assert wallet_id("secret", "gpu-1") == wallet_id("secret", "gpu-2") == "f552d9594b5413e4"
    for token in (None, ""):
        assert wallet_id(token, "gpu-1") == "dfe1f80ee72a6580" != wallet_id(token, "gpu-2")
    plain = {hashlib.new(name, b"secret").hexdigest() for name in ("md5", "sha1", "sha256", "sha512", "blake2b")}
    assert not any(wallet_id("secret", "") in digest for digest in plain)
    with pytest.raises(TrainerUsageError, match="--node-id"):
        wallet_id(None, "")


@pytest.mark.slow
def test_former_names_are_taken_over(tmp_path: Path) -> None:
    former = checkpoint_path(tmp_path, former_wallet_id("secret"), "rank-1")
    newest = checkpoint_path(tmp_path, wallet_id("secret", ""), "rank-1")
    others = checkpoint_path(tmp_path, former_wallet_id("secret"))
    for path in (kept_path(former, 10), kept_path(former, 20), former, others, former.with_suffix(".yaml")):
        path.write_text(path.name)
    take_over_former_names(tmp_path, "secret", "rank-1")
    assert newest.read_text() == former.name
    assert kept_paths(newest) == [kept_path(newest, 20), kept_path(newest, 10)]
    assert newest.with_suffix(".yaml").exists()
    assert others.exists()
    assert not list(tmp_path.glob(f"{former.stem}*"))
    take_over_former_names(tmp_path, "secret", "rank-1")
    take_over_former_names(tmp_path, "another", "rank-1")


def test_former_names_beside_new_ones_or_in_use_are_refused(tmp_path: Path) -> None:
    former = checkpoint_path(tmp_path, former_wallet_id("secret"))
    newest = checkpoint_path(tmp_path, wallet_id("secret", ""))
    former.write_text("former")
    with FileLock(lock_path(former)), pytest.raises(CheckpointError, match="stop it first"):
        take_over_former_names(tmp_path, "secret")
    newest.write_text("newest")
    with pytest.raises(CheckpointError, match="move one of the two away"):
        take_over_former_names(tmp_path, "secret")
    assert (former.read_text(), newest.read_text()) == ("former", "newest")


def test_the_name_is_that_of_the_specification_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    path = checkpoint_path("~/.neuroshard/checkpoints", "ab12")
    assert path == Path("/home/someone/.neuroshard/checkpoints/dynamic_node_ab12.pt")
    assert checkpoint_path("/x", "ab12", "layers-0-7").name == "dynamic_node_ab12_layers-0-7.pt"
    for wallet, instance in (("", ""), ("../x", ""), ("AB", ""), ("ab", "a/b"), ("ab", "..")):
        with pytest.raises(TrainerUsageError, match=r"^(wallet|instance): "):  # They would lead elsewhere.
            checkpoint_path("/x", wallet, instance)


_TIMES = st.integers(0, 4_000_000_000 * 1_000_000)


@given(_TIMES, _TIMES)
def test_a_time_read_off_a_name_is_that_time_and_names_sort_as_times_do(one: int, other: int) -> None:
    assert parse_time(format_time_us(one), now_us=-1) == one
    assert (file_name(one, "b") < file_name(other, "b")) == (one < other)


def test_times_as_people_write_them() -> None:
    expected = {"now": 7, "1970-01-01T00:10": 600_000_000, "1970-01-01T02:10+02:00": 600_000_000}
    expected |= {"1970-01-01 00:10:00.000001+00:00": 600_000_001, "1970-01-02": 86_400_000_000}
    assert {text: parse_time(text, now_us=7) for text in expected} == expected


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
