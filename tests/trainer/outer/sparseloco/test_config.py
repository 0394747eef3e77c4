"""SparseLoCo in a run's options: cadence, what does not go with it, and what other nodes have to have alike."""

from __future__ import annotations

import pytest

from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig
from trainer.errors import TrainerUsageError
from trainer.outer.diloco import DiLoCoConfig
from trainer.outer.sparseloco import SparseLoCoConfig
from trainer.run.cli.train import path_of, with_given
from trainer.run.config import RunConfig


def test_a_run_takes_the_cadence_of_its_strategy() -> None:
    config = RunConfig(strategy="sparseloco", sparseloco=SparseLoCoConfig(inner_steps=40, num_fragments=2))
    assert config.moves_anchor
    assert config.outer == DiLoCoConfig(inner_steps=40, outer_lr=1.0, outer_momentum=0.0, num_fragments=2)
    assert config.round_options.compression == "sparse"
    assert config.residual_decay == 0.95
    dense = RunConfig(diloco=DiLoCoConfig(inner_steps=7))
    assert dense.outer.inner_steps == 7 and dense.residual_decay is None
    assert dense.round_options.compression == "fp32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "sparseloco", "rule": RuleConfig(rule="krum")}, "rule.rule: .* found krum: "),
        ({"strategy": "sparseloco", "collective": CollectiveConfig(powersgd_rank=8)}, "powersgd_rank"),
        ({"collective": CollectiveConfig(compression="sparse")}, "strategy sparseloco"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TrainerUsageError, match=message):
        RunConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.1}, "sparseloco.decay"),
        ({"averaging": "everybody"}, "sparseloco.averaging"),
        ({"inner_steps": 0}, "sparseloco.inner_steps"),
        ({"overlap_steps": 30}, "sparseloco.overlap_steps"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(TrainerUsageError, match=message):
        SparseLoCoConfig(**options)  # type: ignore[arg-type]


def test_inner_steps_on_the_command_line_are_those_of_the_strategy() -> None:
    assert path_of("inner_steps", {"strategy": "sparseloco"}) == "sparseloco.inner_steps"
    assert path_of("inner_steps", {}) == "diloco.inner_steps"
    for given in ({"strategy": "sparseloco", "inner_steps": 7}, {"inner_steps": 7, "strategy": "sparseloco"}):
        assert with_given({"seed": 3}, given) == {
            "seed": 3,
            "strategy": "sparseloco",
            "sparseloco": {"inner_steps": 7},
        }
