from __future__ import annotations

import pytest

from tests.support.model_configs import small_config
from trainer.checkpoint.stages.parts import model_shapes, stage_shapes
from trainer.model import ModelConfig, build_model, build_stage
from trainer.model.plan import StagePlan
from trainer.model.subspace import SubspaceConfig

_OLMO = small_config(qk_norm=True, reorder_norm=True)


@pytest.mark.parametrize(
    "config",
    [small_config(), _OLMO, SubspaceConfig(rank=4).applied_to(_OLMO, free_layers=2)],
    ids=["llama", "olmo2", "subspace"],
)
def test_stages_have_the_parameters_that_are_said_of_them(config: ModelConfig) -> None:
    whole = build_model(config, 0)
    assert model_shapes(config) == {name: tuple(value.shape) for name, value in whole.named_parameters()}
    for layers in ((2, 2), (0, 4), (1, 0, 1, 2)):
        plan = StagePlan.of(config, len(layers), layers)
        for index, name in enumerate(plan.names):
            stage = build_stage(config, plan.ranges, index, 0)
            assert stage_shapes(plan, name) == {each: tuple(value.shape) for each, value in stage.named_parameters()}
