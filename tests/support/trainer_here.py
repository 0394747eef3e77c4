"""The trainer's command line run within the test's own process: for what needs no signals, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.trainer_command import TrainerCommand
from trainer.run.cli.app import run


@dataclass(frozen=True)
class TrainerHere:
    """Runs the command, and hands back what it said."""

    command: TrainerCommand
    capsys: pytest.CaptureFixture[str]
    caplog: pytest.LogCaptureFixture

    def __call__(self, *arguments: str | Path, expect: int = 0) -> str:
        """Trains to the end, which must be ``expect``; what it printed and logged."""
        return self.other(*self.command.line(*arguments)[3:], expect=expect)

    def other(self, *arguments: str | Path, expect: int = 0) -> str:
        self.caplog.clear()
        code = run([str(argument) for argument in arguments])
        output, errors = self.capsys.readouterr()
        said = f"{self.caplog.text}{errors}{output}"
        assert code == expect, said
        return said


@contextmanager
def trainer_here(
    command: TrainerCommand,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TrainerHere]:
    for name in ("GENESIS_TOKEN", "GENESIS_STORE", "GENESIS_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(command.folder / "cache"))
    with caplog.at_level("INFO"):
        yield TrainerHere(command, capsys, caplog)
