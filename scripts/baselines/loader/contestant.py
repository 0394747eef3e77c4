"""What the contestants of `scripts/bench_loader.py` have in common: each is a process that makes passes when asked to.

A contestant is started as ``python ITS_SCRIPT.py serve '{"data": …, "seq_len": …, …}'`` with the Python of its own
virtual environment, reads one request a line and answers each with one line of JSON; between requests it sleeps, so
that several can take turns on one machine. ``python ITS_SCRIPT.py convert TOKENS OUT SEQ_LEN`` writes the tokens (one
uint16 file) in its own format. The standard library only: this module runs in every contestant's environment.

A pass is an iterator of batches, and what is timed is exactly the loop over it: the same few instructions for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    Pass = Iterator[tuple[Tensor, Tensor]]
    """Inputs and labels, int64[B, T] each."""

T = TypeVar("T")


def run(
    prepare: Callable[[dict[str, Any]], Callable[[], Pass]], convert: Callable[[Path, Path, int], None] | None = None
) -> None:
    """Does what the command line says.

    Args:
        prepare: from the options to a function that begins another pass.
        convert: writes a file of uint16 tokens in the contestant's format, for windows of so many; None if it reads
            what there is.
    """
    command, *arguments = sys.argv[1:]
    if command == "convert":
        if convert is not None:
            convert(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
        return
    # Libraries that print must not garble the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        make_pass = prepare(json.loads(arguments[0]))
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(take_pass(make_pass(), **json.loads(line))), file=answers, flush=True)


def take_pass(batches: Pass, *, skip: int = 0, count: int | None = None, digest: bool = False) -> dict[str, Any]:
    """Runs through a pass.

    Args:
        batches: the pass.
        skip: batches before the clock is started.
        count: batches that are timed; None for all.
        digest: return what the batches hold instead of how long they took.

    Returns:
        ``tokens``, ``seconds`` and ``cpu_seconds`` (all threads of this process, none of its workers), or ``sha256``.
    """
    for _ in islice(batches, skip):
        pass
    taken = islice(batches, count)
    if digest:
        content = hashlib.sha256()
        for inputs, labels in taken:
            content.update(inputs.numpy())
            content.update(labels.numpy())
        return {"sha256": content.hexdigest()}
    tokens = 0
    cpu_begun = time.process_time()
    begun = time.perf_counter()
    for inputs, _ in taken:
        tokens += inputs.numel()
    seconds = time.perf_counter() - begun
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": time.process_time() - cpu_begun}


def batched(samples: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` samples; what is left at the end is dropped."""
    # Not with islice: it would ask for an iterator anew, and a dataset that is its own begins again then.
    batch: list[T] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []


def split(rows: Iterable[Tensor], *, views: bool = False) -> Pass:
    """Inputs and labels of int64[B, T + 1]: two tensors of their own, as everyone hands out, or two views of it."""
    for batch in rows:
        if views:
            yield batch[:, :-1], batch[:, 1:]
        else:
            yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
