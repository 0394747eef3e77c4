"""`Progress`: how far a node is, as the others are told."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.network.discovery.stage_report import StageReport

__all__ = ["Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an announcement says of training."""

    inner_step: int = 0
    """Inner steps this node has done."""
    loss: float | None = None
    """Averaged over some 50 steps; None before the first."""
    tokens_per_s: float = 0.0
    shards: tuple[int, ...] = ()
    """What it reads in this epoch."""
    stage: StageReport | None = None
    """What a worker holds of a pipeline, and how it is doing."""
