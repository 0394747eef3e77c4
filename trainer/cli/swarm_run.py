"""What commands about a swarm's checkpoints need of its run file: whose they are, where they are, and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainerUsageError

__all__ = ["SwarmRun", "read_swarm_run"]


@dataclass(frozen=True, slots=True)
class SwarmRun:
    """A part of a run file."""

    run_id: str
    directory: str
    """Of its stages' checkpoints."""
    data: Mapping[str, Any]
    """Its ``data`` options."""


def read_swarm_run(file: Path, directory: str = "") -> SwarmRun:
    """Reads ``run_id``, ``data`` and ``swarm.stagewise`` of a run file; other parts are not looked at.

    Args:
        file: YAML.
        directory: of checkpoints, in the place of the file's; empty: the file's.

    Raises:
        TrainerUsageError: it cannot be read, or one of these makes no sense.
    """
    from trainer.config import RunConfig, from_mapping, read_yaml
    from trainer.stagewise import StagewiseConfig

    values = read_yaml(file)
    swarm = _part(values, "swarm")
    stagewise = from_mapping(StagewiseConfig, _part(swarm, "stagewise"), "swarm.stagewise.")
    named = {"run_id": values["run_id"]} if "run_id" in values else {}
    return SwarmRun(from_mapping(RunConfig, named).run_id, directory or stagewise.directory, _part(values, "data"))


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise TrainerUsageError(f"{name}: expected a mapping of options, found {found!r}")
    return found
