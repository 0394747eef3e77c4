"""What a process was started with, for the first event of each of its lives: machine, versions, options.

A log then says by itself what was run, on what and how: a report needs nothing else. It is read once, in some
milliseconds, before training begins. Secrets are no part of a configuration's mapping, so they cannot be in a log; what
the platform does not tell is left out.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from genesis import __version__
from trainer.run.config import RunConfig, to_mapping

LOG_FORMAT: Final = 1
"""Grows where a field of an event changes its meaning; new fields and kinds do not count."""
_CPU = Path("/proc/cpuinfo")
_MEMORY = Path("/proc/meminfo")
_MAX_DEVICES = 64


def start_facts(config: RunConfig, role: str, stage: str) -> dict[str, Any]:
    """Returns the fields of a ``start`` event."""
    options = to_mapping(config)
    usual = dict(_flat(to_mapping(RunConfig())))
    return {
        "log_format": LOG_FORMAT,
        "role": role,
        "stage": stage,
        "run_id": config.run_id,
        "run_digest": config.run_digest,
        "versions": _versions(),
        "machine": machine_facts(),
        "options": options,
        # By name: another release has other defaults, and could not tell.
        "options_changed": sorted(name for name, value in _flat(options) if usual.get(name) != value),
    }


def machine_facts() -> dict[str, Any]:
    """Returns what this machine is: its name, system, processor, memory and accelerators."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": _field(_CPU, "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "devices": _devices(),
    }
    memory_kb = _field(_MEMORY, "MemTotal").removesuffix("kB").strip()
    if memory_kb.isdecimal():
        found["memory_bytes"] = int(memory_kb) * 1024
    return found


def _versions() -> dict[str, str]:
    found = {"genesis": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    known = (torch.cuda.get_device_properties(index) for index in range(min(torch.cuda.device_count(), _MAX_DEVICES)))
    return [{"name": it.name, "memory_bytes": it.total_memory} for it in known]


def _field(path: Path, name: str) -> str:
    """Returns the first value of a name in a file of lines ``name : value``; empty if there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), ""
            )
    except OSError:
        return ""


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
