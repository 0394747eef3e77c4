"""A tokenizer; processes of their own that start in a fraction of a second."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from manifests import FIRST_MERGE_ID, VocabularyFile

MERGES = [(114 + 10, 111), (266, 118), (42, 126)]
NUM_IDS = FIRST_MERGE_ID + len(MERGES)
_PRELOADED = (
    *("trainer.checkpoint.node.checkpointer", "trainer.inner.loop", "trainer.model.stages"),
    *("trainer.checkpoint.stages.writer", "trainer.checkpoint.stages.sets", "trainer.checkpoint.stages.parts"),
)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(VocabularyFile.from_pairs(MERGES, {"tiny": len(MERGES)}).to_json())
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., ForkServerProcess]]:
    """Starts a process with a function and its arguments; none outlives the test."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([*_PRELOADED])
    started: list[ForkServerProcess] = []

    def begin(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
        process = processes.Process(target=function, args=arguments)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join(30)
