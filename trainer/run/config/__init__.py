"""A run's configuration: typed, checked, from YAML and the command line, printed back as YAML.

Each part's dataclass lives beside what it configures; ``run.py`` puts them together, ``reading.py`` reads and
writes them.
"""

from __future__ import annotations

from trainer.run.config.reading import (
    changed_options,
    from_mapping,
    merged,
    nested,
    read_run,
    read_yaml,
    to_mapping,
    to_yaml,
)
from trainer.run.config.run import DataConfig, RunConfig

__all__ = [
    "DataConfig",
    "RunConfig",
    "changed_options",
    "from_mapping",
    "merged",
    "nested",
    "read_run",
    "read_yaml",
    "to_mapping",
    "to_yaml",
]
