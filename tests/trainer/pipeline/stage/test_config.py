"""The options of a stage's compute."""

from __future__ import annotations

import math

import pytest

from trainer.errors import TrainerUsageError
from trainer.pipeline.stage import StageConfig


def test_the_defaults_hold_together_and_clipping_can_be_off() -> None:
    assert StageConfig().backward == "cached"
    assert StageConfig(clip_factor=math.inf, tail_clip_factor=math.inf).clip_factor == math.inf


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target_tokens": -1}, "target_tokens"),
        ({"clip_factor": 0.0}, "clip_factor"),
        ({"clip_factor": math.nan}, "clip_factor"),
        ({"tail_clip_factor": -1.0}, "tail_clip_factor"),
        ({"outlier_factor": 0.5}, "outlier_factor"),
        ({"outlier_factor": math.nan}, "outlier_factor"),
        ({"backward": "both"}, "backward"),
        ({"max_cached_bytes": -1}, "max_cached_bytes"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(TrainerUsageError, match=rf"^{field}: expected .*, found "):
        StageConfig(**options)
