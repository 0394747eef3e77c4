"""Options that are set and change nothing here, told in one line: who ignores an option silently seems to obey it.

What contradicts is refused (`RunConfig`); what is merely of no use is told, since one file may serve nodes of different
kinds, and a strategy's options may stay in it while another is tried. Only sections that are read as a whole by one
strategy, or that one option switches on, are looked at: an option that is read and makes no difference is not found.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from trainer.run.config.reading import changed_options
from trainer.run.config.run import RunConfig

logger = logging.getLogger(__name__)

_NAMED: Final = 6
"""Options named in the line at most."""


@dataclass(frozen=True, slots=True)
class _Use:
    """Options, and whether a run uses them."""

    prefixes: tuple[str, ...]  # Of their names; a whole name is one too.
    is_used: bool
    needs: str


def unused_options(config: RunConfig, *, holds_stage: bool = False) -> dict[str, str]:
    """Returns what each option that is set, and not used, would need; ``holds_stage``: by a worker of a stage."""
    uses = _uses(config, in_swarm=holds_stage or config.pipeline == "swarm" or config.swarm.whole_nodes)
    found: dict[str, str] = {}
    for name in changed_options(config):
        needs = next((use.needs for use in uses if not use.is_used and name.startswith(use.prefixes)), "")
        if needs:
            found[name] = needs
    return found


def tell_unused(config: RunConfig, *, holds_stage: bool = False) -> None:
    """Logs one line that names the options without effect, if there are any."""
    by_need: dict[str, list[str]] = {}
    for name, needs in unused_options(config, holds_stage=holds_stage).items():
        by_need.setdefault(needs, []).append(name)
    if by_need:
        told = "; ".join(f"{_listed(names)} (of use with {needs})" for needs, names in by_need.items())
        logger.warning("set and without effect here: %s", told)


def _uses(config: RunConfig, *, in_swarm: bool) -> tuple[_Use, ...]:
    strategy = config.strategy
    return (
        _Use(("bucket.",), config.bucket.is_used, "--rounds (bucket.url)"),
        _Use(("sparseloco.",), strategy == "sparseloco", "strategy sparseloco"),
        _Use(("collective.compression",), strategy != "sparseloco", "strategies that have no encoding of their own"),
        _Use(("diloco.",), strategy == "diloco", "strategy diloco"),
        _Use(("grad.",), strategy == "grad", "strategy grad"),
        _Use(("swarm.sparta.", "swarm.join.max_rounds_behind"), strategy == "async_sparta", "strategy async_sparta"),
        _Use(
            ("swarm.",),
            in_swarm,
            "--pipeline swarm, 'trainer worker' or swarm.whole_nodes: this node takes no part in a swarm",
        ),
        _Use(("collective.max_grace_s",), bool(config.collective.quorum), "collective.quorum"),
        _Use(("log.project", "log.curves_dir", "log.every_steps"), bool(config.log.to), "--log-to (log.to)"),
        _Use(("swarm.subspace.",), bool(config.swarm.subspace.rank), "swarm.subspace.rank"),
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
