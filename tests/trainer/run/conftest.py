"""Nodes with a store they share, and a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere, trainer_here


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerCommand:
    return TrainerCommand(text_store(), tmp_path)


@pytest.fixture
def here(
    trainer: TrainerCommand,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TrainerHere]:
    with trainer_here(trainer, capsys, caplog, monkeypatch) as command:
        yield command
