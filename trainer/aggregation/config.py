"""Options of the aggregation rule and of gradient validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trainer.errors import TrainerUsageError

RuleName = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "centered_clip"]
ValidationMode = Literal["off", "log", "enforce"]
Averaging = Literal["replicas", "senders"]
"""By what the sum at a coordinate is divided: the weight of all members of the result, or of those that sent it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleConfig:
    """Aggregation rule and gradient validation; the defaults suit runs that strangers can join.

    The bounds are those of spec T-20. ``trim_fraction`` differs from spec T-18, whose 0.1 trims nobody below ten.
    """

    rule: RuleName = "trimmed_mean"
    """How vectors become one: mean, median, trimmed_mean, krum, multi_krum or centered_clip."""
    trim_fraction: float = 0.3
    """trimmed_mean: share of the members left out at each end of every coordinate, 0 to 0.5 exclusive."""
    num_byzantine: int = 1
    """Members that may lie: at least so many are trimmed at each end; Krum needs 2 of it plus 3 members."""
    clip_radius: float = 0.0
    """centered_clip: how far one member may pull, in units of the vector's norm; 0 takes the median distance."""
    validation: ValidationMode = "enforce"
    """off; log: report members whose vector differs too much from the others'; enforce: also leave them out."""
    min_cosine: float = 0.3
    """Least cosine to the nearer half of the other members, as a share of the round's median, -1 to 1."""
    min_norm_ratio: float = 0.1
    """Least norm over the median member's."""
    max_norm_ratio: float = 10.0
    """Greatest norm over the median member's."""
    max_variance_ratio: float = 100.0
    """Greatest variance of the values over the median member's."""

    def __post_init__(self) -> None:
        rules, modes = get_args(RuleName), get_args(ValidationMode)
        for field, is_valid, expected in (
            ("rule", self.rule in rules, f"one of {', '.join(rules)}"),
            ("validation", self.validation in modes, f"one of {', '.join(modes)}"),
            ("trim_fraction", 0 <= self.trim_fraction < 0.5, "0 <= trim_fraction < 0.5"),
            ("num_byzantine", self.num_byzantine >= 0, "0 or more"),
            ("clip_radius", 0 <= self.clip_radius < float("inf"), "0 (automatic) or more, finite"),
            ("min_cosine", -1 <= self.min_cosine <= 1, "-1 to 1"),
            ("min_norm_ratio", 0 <= self.min_norm_ratio <= 1, "0 to 1"),
            ("max_norm_ratio", self.max_norm_ratio >= 1, "1 or more"),
            ("max_variance_ratio", self.max_variance_ratio >= 1, "1 or more"),
        ):
            if not is_valid:
                raise TrainerUsageError(f"{field}: expected {expected}, found {getattr(self, field)!r}")


def require_sparse_rule(rule: RuleConfig) -> None:
    """Raises TrainerUsageError for a rule that sparse contributions cannot go through.

    The default of dense rounds, ``trimmed_mean``, and ``mean`` both stand for the mean clipped to the median norm.
    """
    reasons = {
        "median": "most members send nothing at a coordinate, so that the middle value is zero nearly everywhere",
        "krum": "vectors that hardly overlap are as far from each other as they are long, and the shortest would win",
        "multi_krum": "vectors that hardly overlap are as far from each other as they are long",
        "centered_clip": "it begins with one member's vector, which hardly overlaps with the others'",
    }
    if rule.rule in reasons:
        raise TrainerUsageError(
            f"rule.rule: expected mean with sparse contributions, which clips it to the median norm, found "
            f"{rule.rule}: {reasons[rule.rule]}"
        )
