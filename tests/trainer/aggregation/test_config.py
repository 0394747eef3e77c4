"""Options of rule and validation."""

from __future__ import annotations

import math

import pytest

from trainer.aggregation import RuleConfig
from trainer.errors import TrainerUsageError


def test_defaults_are_for_strangers_and_the_bounds_are_the_specifications():
    config = RuleConfig()
    assert (config.rule, config.validation) == ("trimmed_mean", "enforce")
    assert (config.trim_fraction, config.num_byzantine) == (0.3, 1)
    assert (config.min_cosine, config.min_norm_ratio, config.max_norm_ratio) == (0.3, 0.1, 10.0)
    assert config.max_variance_ratio == 100.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rule", "average"),
        ("validation", "strict"),
        ("trim_fraction", 0.5),
        ("trim_fraction", -0.1),
        ("trim_fraction", math.nan),
        ("num_byzantine", -1),
        ("clip_radius", -1.0),
        ("clip_radius", math.inf),
        ("min_cosine", 1.5),
        ("min_norm_ratio", 2.0),
        ("max_norm_ratio", 0.5),
        ("max_variance_ratio", math.nan),
    ],
)
def test_a_value_that_makes_no_sense_is_named(field, value):
    with pytest.raises(TrainerUsageError, match=field):
        RuleConfig(**{field: value})
