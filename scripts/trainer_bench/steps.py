"""What a step of `python -m trainer` costs over that of a loop written by hand: same model, optimizer, batches.

Ours is the whole command, one node alone: loader, checks for NaN, event log, HTTP interface, JSON lines, a checkpoint
every 10 steps (copied by the training thread, written by another). The other has its batches in memory and does
nothing else. Both live all the time, but only one runs at once: the other is stopped (SIGSTOP). A turn is so many steps
of one; its time is that from letting it go on to its last line. What it has done of the next step when it is stopped,
the next turn need not do: that evens out. Losses are compared, so that both do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from scripts.trainer_bench.crew import MEMBERS, ROOT, load_average
from scripts.trainer_bench.workspace import VOCAB_ROWS, make_store

ASKED = 1.02
_NODE_ID = "bench"
_START_S = 60.0
_TURN_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Looper:
    """A process that prints a line a step, and stands still unless it is its turn."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._name = name
        self._process = process
        self._pending = b""
        self.losses: list[float] = []

    def turn(self, steps: int, timeout_s: float = _TURN_S) -> dict[str, float]:
        """Lets it take so many steps; seconds a step, of wall and of processor time (of all its threads)."""
        cpu_s, began_s = self._cpu_s(), time.monotonic()
        os.killpg(self._process.pid, signal.SIGCONT)
        deadline_s = began_s + timeout_s
        for _ in range(steps):
            self.losses.append(self._next_step(deadline_s))
        wall_s = time.monotonic() - began_s
        os.killpg(self._process.pid, signal.SIGSTOP)
        return {"wall_s": wall_s / steps, "cpu_s": (self._cpu_s() - cpu_s) / steps}

    def _next_step(self, deadline_s: float) -> float:
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                found = json.loads(line)
                if found["kind"] == "step":
                    return float(found["loss"])
                continue
            self._pending += self._read(deadline_s)

    def _read(self, deadline_s: float) -> bytes:
        chunk = b""
        if self._process.stdout is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if selector.select(max(0.0, deadline_s - time.monotonic())):
                    chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        if not chunk:
            raise SystemExit(f"{self._name} ended, or took no step in time; BENCH_STDERR=1 shows what it says")
        return chunk

    def _cpu_s(self) -> float:
        """Of all its processes: a node of several ranks has some."""
        total = 0
        for pid in (self._process.pid, *(child.pid for child in psutil.Process(self._process.pid).children())):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / _TICKS


@contextmanager
def looper(name: str, command: Sequence[str]) -> Iterator[Looper]:
    """Started, and killed at the end."""
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as process:
        try:
            yield Looper(name, process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def bench_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ours and the other in turn."""
    store = make_store(arguments)
    with tempfile.TemporaryDirectory(prefix="genesis-bench-step-") as folder, ExitStack() as stack:
        options = {"preset": arguments.step_preset, "vocab_rows": VOCAB_ROWS, "threads": arguments.threads}
        options["batches"] = str(keep_batches(store, Path(folder), arguments))
        command = {
            "genesis": our_command(store, Path(folder), arguments),
            "by hand": [str(MEMBERS / "plain_loop.py"), json.dumps(options)],
        }
        loops = {name: stack.enter_context(looper(name, words)) for name, words in command.items()}
        report = {"load": [load_average()], **measured(loops, arguments)}
    report["load"].append(load_average())
    print(as_text(report, arguments))
    return report


def measured(loops: dict[str, Looper], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of the turns, and of the ratios of neighbouring turns, which a changing load changes least."""
    steps, until_s = arguments.turn_steps, time.monotonic() + arguments.step_s
    for each in loops.values():
        each.turn(steps, _START_S)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    while time.monotonic() < until_s or len(turns["genesis"]) < 3:
        names = list(loops) if len(turns["genesis"]) % 2 else list(reversed(loops))
        for name in names:
            turns[name].append(loops[name].turn(steps))
    check_same_losses(loops)
    report: dict[str, Any] = {"turns": len(turns["genesis"])}
    for kind in ("wall_s", "cpu_s"):
        ours, others = ([turn[kind] for turn in turns[name]] for name in ("genesis", "by hand"))
        ratios = sorted(mine / other for mine, other in zip(ours, others, strict=True))
        quarter = len(ratios) // 4
        report[kind] = {
            "genesis": median(ours),
            "by hand": median(others),
            "ratio": median(ratios),
            "quartiles": [ratios[quarter], ratios[-1 - quarter]],
            "sums": sum(ours) / sum(others),
        }
    return report


def check_same_losses(loops: dict[str, Looper]) -> None:
    """Both train alike, or the comparison is none."""
    pairs = list(zip(loops["genesis"].losses, loops["by hand"].losses, strict=False))
    worst = max(abs(ours - other) for ours, other in pairs)
    if worst > 0.02:
        raise SystemExit(f"expected the same losses of both, found them {worst:.3g} apart")


def our_command(store: Path, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """`python -m trainer` as one runs it, but for folders of its own."""
    command = ["-m", "trainer", "--node-id", _NODE_ID, "--store", str(store), "--preset", arguments.step_preset]
    command += ["--seq-len", str(arguments.seq_len), "--batch-size", str(arguments.batch_size)]
    command += ["--threads", str(arguments.threads), "--checkpoint-dir", str(folder / "checkpoints"), "--json"]
    command += ["--log-dir", str(folder / "logs"), "--api-port", "0", "--plateau", "off"]
    return [*command, "--set", f"state_dir={folder}", "--set", f"data.cache_dir={folder / 'cache'}"]


def keep_batches(store: Path, folder: Path, arguments: argparse.Namespace) -> Path:
    """The batches our node will be given, as one tensor of so many [2, rows, tokens]."""
    import torch

    from loader import GenesisDataset

    size = {"seq_len": arguments.seq_len, "batch_size": arguments.batch_size}
    dataset = GenesisDataset(str(store), _NODE_ID, cache_dir=str(folder / "cache"), plateau="off", seed=0, **size)
    kept = []
    for batch in dataset:
        kept.append(torch.stack([batch["input_ids"], batch["labels"]]))
        if len(kept) == arguments.kept_batches:
            break
    path = folder / "batches.pt"
    torch.save(torch.stack(kept), path)
    return path


def as_text(report: dict[str, Any], arguments: argparse.Namespace, asked: float = ASKED) -> str:
    """The report for people."""
    what = (
        f"{arguments.step_preset}, {arguments.batch_size} x {arguments.seq_len} tokens, {arguments.threads} thread(s)"
    )
    lines = [
        f"a step, {what}, {report['turns']} turns of {arguments.turn_steps} steps   ({' to '.join(report['load'])})",
        f"  {'ms a step':12} {'python -m trainer':>18} {'by hand':>9} {'ratio':>7}   quartiles     of sums",
    ]
    for kind in ("wall_s", "cpu_s"):
        found = report[kind]
        low, high = found["quartiles"]
        line = f"  {kind[:-2]:12} {1e3 * found['genesis']:>18.2f} {1e3 * found['by hand']:>9.2f} {found['ratio']:>7.3f}"
        lines.append(f"{line}   {low:.3f}-{high:.3f}   {found['sums']:.3f}   asked {asked}")
    return "\n".join(lines)
