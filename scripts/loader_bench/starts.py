"""How soon a new process has its first batch when the cache is warm, and what its imports cost."""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Any

from scripts.loader_bench.link import served
from scripts.loader_bench.passes import load_average
from scripts.loader_bench.workspace import CONTESTANTS, ROOT, Workspace, child_environment

ASKED = 1.15
OTHER = "torch and a memmap"
_TIMEOUT_S = 120.0
_IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|( +)(\S+)")


def bench_cold_start(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Any]:
    """Whole processes in turn: ours, and one that imports torch and reads one window."""
    with served(workspace.store) as port:
        commands = {
            OTHER: memmap_window(workspace),
            "genesis": first_batch(workspace, str(workspace.store)),
            "genesis, http": first_batch(workspace, f"http://127.0.0.1:{port}"),
        }
        for command in commands.values():
            run_to_first_batch(command)  # Writes bytecode, warms caches.
        load = [load_average()]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in range(arguments.starts):
            for name, command in commands.items():
                age_manifests(workspace)
                runs[name].append(run_to_first_batch(command))
        extra = {name: imports(command, commands[OTHER]) for name, command in commands.items() if name != OTHER}
    walls = {name: summary(found) for name, found in runs.items()}
    report = {
        "load": [*load, load_average()],
        "seconds": walls,
        "ratio": {name: {kind: wall[kind] / walls[OTHER][kind] for kind in wall} for name, wall in walls.items()},
        "phases_ms": {name: phases(found) for name, found in runs.items()},
        "imports_ms": extra,
    }
    print(as_text(report, arguments.starts))
    return report


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median and the best wall time, and the median processor time, in seconds."""
    walls = [run["wall_s"] for run in runs]
    return {"median": median(walls), "best": min(walls), "cpu": median(run["cpu_s"] for run in runs)}


def age_manifests(workspace: Workspace) -> None:
    """Lets the next start ask its store for the manifest, as one that is more than a minute later does."""
    for manifest in (workspace.cache / "stores").glob("*/manifest.json"):
        notes, _, body = manifest.read_bytes().partition(b"\n")
        aged = {**json.loads(notes), "checked_at": time.time() - 3600}
        manifest.write_bytes(json.dumps(aged).encode() + b"\n" + body)


def first_batch(workspace: Workspace, store: str) -> list[str]:
    """The command of our process."""
    return [str(CONTESTANTS / "first_batch.py"), store, str(workspace.cache), "bench"]


def memmap_window(workspace: Workspace) -> list[str]:
    """The command of the other."""
    return [str(CONTESTANTS / "memmap_window.py"), str(workspace.tokens)]


def run_to_first_batch(command: list[str]) -> dict[str, float]:
    """Runs a script to its end.

    Returns:
        What it printed; its times in seconds since it was started; ``wall_s``, the whole of it; and ``cpu_s``, the
        processor time it took, which a busy machine changes less.
    """
    used = cpu_of_children()
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=child_environment(),
        timeout=_TIMEOUT_S,
    )
    wall_s = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout)
    marks = {name: found[name] - started for name in ("entered", "imported", "opened", "first_batch") if name in found}
    return {**found, **marks, "wall_s": wall_s, "cpu_s": cpu_of_children() - used}


def cpu_of_children() -> float:
    """Processor seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def phases(runs: list[dict[str, float]]) -> dict[str, float]:
    """How long each phase took, in ms: medians."""
    borders = [name for name in ("entered", "imported", "opened", "first_batch", "wall_s") if name in runs[0]]
    names = {"entered": "python starts", "imported": "imports", "opened": "manifest and shards found"}
    names |= {"first_batch": "first batch", "wall_s": "process ends"}
    before = [None, *borders[:-1]]
    return {
        names[border]: 1e3 * median(run[border] - (run[previous] if previous else 0.0) for run in runs)
        for border, previous in zip(borders, before, strict=True)
    }


def imports(command: list[str], other: list[str]) -> dict[str, Any]:
    """What our process imports that the other does not: ms by package (their own code), and the largest modules.

    Timed by ``-X importtime``, which makes imports some 10 to 30 % slower than they are.
    """
    mine, known = import_times(command), import_times(other).keys()
    extra = {name: own_us for name, own_us in mine.items() if name not in known}
    packages: dict[str, int] = defaultdict(int)
    for name, own_us in extra.items():
        packages[name.split(".")[0]] += own_us
    by_cost = sorted(packages.items(), key=lambda item: -item[1])
    largest = sorted(extra.items(), key=lambda item: -item[1])
    return {
        "all": sum(mine.values()) / 1e3,
        "not in the other": sum(extra.values()) / 1e3,
        "packages": {name: own_us / 1e3 for name, own_us in by_cost[:20]},
        "modules": {name: own_us / 1e3 for name, own_us in largest[:12]},
    }


def import_times(command: list[str]) -> dict[str, int]:
    """By module, the microseconds of its own code."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=child_environment(),
        timeout=_TIMEOUT_S,
    )
    return {match[4]: int(match[1]) for match in _IMPORT_LINE.finditer(done.stderr)}


def as_text(report: dict[str, Any], starts: int) -> str:
    """The report for people."""
    lines = [f"first batch of a new process, warm cache, {starts} each in turn   ({' to '.join(report['load'])})"]
    for name, found in report["seconds"].items():
        ratio = report["ratio"][name]
        line = f"  {name:20} {found['median']:6.3f} s, best {found['best']:6.3f} s, processor {found['cpu']:6.3f} s"
        asked = "   times: " + ", ".join(f"{kind} {times:.3f}" for kind, times in ratio.items()) + f"; asked {ASKED}"
        lines.append(line + (asked if name != OTHER else ""))
    for name, found in report["phases_ms"].items():
        lines.append(f"  {name}, ms: " + ", ".join(f"{phase} {ms:.0f}" for phase, ms in found.items()))
    for name, found in report["imports_ms"].items():
        total, extra = found["all"], found["not in the other"]
        lines.append(f"  {name} under -X importtime: {total:.0f} ms, {extra:.0f} not in the other")
        for what in ("packages", "modules"):
            listed = ", ".join(f"{module} {ms:.1f}" for module, ms in found[what].items())
            lines.append(f"    {what}: {listed}")
    return "\n".join(lines)
