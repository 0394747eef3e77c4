"""Steps, rounds and announcements as the trainer's other packages report them to trainer.monitor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """A StepResult."""

    step: int = 1
    loss: float = 4.0
    grad_norm: float = 0.5
    lr: float = 1e-4
    num_tokens: int = 4096
    skipped: bool = False
    seconds: float = 0.25


@dataclass(frozen=True, slots=True)
class Report:
    """A RoundReport."""

    round_index: int = 0
    members: tuple[str, ...] = ("a" * 64, "b" * 64)
    dropped: tuple[tuple[str, str], ...] = ()
    completeness: float = 1.0
    sent_bytes: int = 1_000
    received_bytes: int = 2_000
    seconds: float = 1.5
    rule: str = "mean"
    num_passes: int = 1
    weights: tuple[float, ...] = (1.0, 1.0)
    validation: tuple[object, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Announced:
    """An Announcement."""

    peer_id: str
    node_id: str = ""
    outer_step: int = 1
    state_digest: str = "d1"
    inner_step: int = 100
    loss: float | None = 3.0
    tokens_per_s: float = 1_000.0
    shards: tuple[int, ...] = ()
    expires_at: float = float("inf")
