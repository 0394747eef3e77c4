"""Processes of their own that start in a fraction of a second, with torch and the trainer imported already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_configs import write_tokenizer


@pytest.fixture
def start() -> Iterator[Callable[..., ForkServerProcess]]:
    """Starts a process with a function and its arguments; none outlives the test."""
    started: list[ForkServerProcess] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.stage_files"])

    def begin(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
        process = context.Process(target=function, args=arguments)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join(30)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)
