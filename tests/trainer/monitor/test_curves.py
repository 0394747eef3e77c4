"""Curves by the libraries themselves, read back by their own readers; and libraries that fail."""

from __future__ import annotations

import logging
import resource
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.inner import StepResult
from trainer.monitor import curves as module
from trainer.monitor.curves import Curve, CurveLog

# What the libraries and theirs warn of when they are imported is theirs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def curve(folder: Path, first_step: int = 0, name: str = "gpu-7") -> Curve:
    return Curve(
        id="1f2e3d4c", name=name, group="run", project="curves", folder=folder, first_step=first_step,
        options={"inner": {"lr": 1e-4}},
    )  # fmt: skip


def evaluation(step: int) -> Any:
    loss = SimpleNamespace(nats_per_token=3.5, bits_per_byte=1.25, num_tokens=64, num_bytes=200)
    held_out = SimpleNamespace(whole=loss, by_source={"web": loss}, seconds=0.1)
    return SimpleNamespace(step=step, held_out=held_out, samples=(SimpleNamespace(prompt="a", text="b\x1b[31m"),))


def trained(log: CurveLog, steps: range, *, loss: float = 0.0) -> None:
    """Steps from a checkpoint on, and a measurement after the last."""
    log.start()
    for step in steps:
        result = StepResult(step, loss + step, 1.0, 1e-4, 64, False, 0.5)
        log.step(result, num_tokens=64 * (step + 1), loader_wait_s=0.0)
    log.evaluation(evaluation(steps[-1] + 1), num_tokens=64 * (steps[-1] + 1))
    log.close()


def interrupted(name: Any, folder: Path) -> None:
    """A run of 12 steps that goes on from its checkpoint of step 8, with other losses, up to 20."""
    trained(CurveLog([name], curve(folder), every_steps=2), range(12))
    trained(CurveLog([name], curve(folder, first_step=8), every_steps=2), range(8, 20), loss=100.0)


@pytest.mark.slow
def test_tensorboard_goes_on_from_the_checkpoint_and_shows_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    interrupted("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tmp_path / "tensorboard").iterdir()
    found = EventAccumulator(str(folder)).Reload()
    losses = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert losses == [(2, 1), (4, 3), (6, 5), (8, 7), (10, 109), (12, 111), (14, 113), (16, 115), (18, 117), (20, 119)]
    assert [(point.step, point.value) for point in found.Scalars("tokens")][-1] == (20, 1280)
    assert found.Scalars("held_out/bits_per_byte/web")[-1].value == 1.25
    assert "sample/0/text_summary" in found.Tags()["tensors"]


def wandb_rows(path: Path) -> Iterator[dict[str, str]]:
    """The history in a file of wandb's, whose only reader is in its Go program: LevelDB's log of protobuf records.

    Blocks of 32 KiB, the first of which begins with 7 bytes of header, hold pieces: crc32, length, and whether it is a
    whole record (1), or the first, a middle, or the last piece of one (2, 3, 4).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, pieces = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while place + 7 <= len(data):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record, pieces = Record.FromString(pieces), b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


@pytest.mark.slow
def test_wandb_offline_has_each_step_once_under_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    interrupted("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in files] == ["run-1f2e3d4c.wandb"] * 2
    rows = [row for path in files for row in wandb_rows(path)]
    assert [int(row["_step"]) for row in rows] == list(range(2, 21, 2))
    assert [float(row["train/loss"]) for row in rows] == [1, 3, 5, 7, 9, 11, 113, 115, 117, 119]
    assert [row["held_out/nats_per_token"] for row in rows if "held_out/nats_per_token" in row] == ["3.5", "3.5"]


@pytest.mark.slow
def test_trackio_has_each_step_once_under_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # Read when it is imported.
    pytest.importorskip("trackio", reason="needs the extra trackio")
    interrupted("trackio", tmp_path)
    assert capsys.readouterr().out == "", "standard output is for programs"
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("curves", "gpu-7-1f2e3d4c")
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(2, 21, 2))
    assert [row["train/loss"] for row in steps] == [1, 3, 5, 7, 9, 11, 113, 115, 117, 119]
    assert [row["held_out/bits_per_byte"] for row in rows if "held_out/bits_per_byte" in row] == [1.25, 1.25]


class Failing:
    def __init__(self, error: BaseException, calls: list[int]) -> None:
        self.error, self.calls = error, calls

    def log(self, step: int, values: Mapping[str, object]) -> None:
        self.calls.append(step)
        raise self.error

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), SystemExit(1)])
def test_a_library_that_fails_costs_one_warning_and_its_own_curves(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    points: list[int] = []
    good = SimpleNamespace(log=lambda step, _: points.append(step), close=lambda: points.append(-1))

    def refused(_: Curve) -> Any:
        raise error

    openers = {"tensorboard": lambda _: good, "wandb": lambda _: Failing(error, calls), "trackio": refused}
    monkeypatch.setattr(module, "_OPENERS", openers)
    with caplog.at_level(logging.WARNING):
        trained(CurveLog(["tensorboard", "wandb", "trackio"], curve(tmp_path), every_steps=1), range(5))
    assert calls == [1]
    assert points == [1, 2, 3, 4, 5, -1]
    assert [record.message.split(":")[0] for record in caplog.records] == ["trackio", "wandb"]
    assert all("training goes on without its curves" in record.message for record in caplog.records)


@pytest.mark.slow
def test_a_full_disk_ends_the_curves_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = CurveLog(["tensorboard"], curve(tmp_path), every_steps=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        trained(log, range(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.message.split(":")[0] for record in caplog.records] == ["tensorboard"]
    assert "File too large; training goes on without its curves" in caplog.text
