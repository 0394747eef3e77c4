from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.model_configs import small_config
from trainer.errors import TrainerUsageError
from trainer.model import PRESETS, ModelConfig, preset
from trainer.model.layers import make_blocks
from trainer.model.plan import StagePlan, cut_by_memory
from trainer.model.stages import Readout


def test_a_config_survives_json_where_a_field_with_a_default_may_be_missing():
    config = small_config(qk_norm=True, rope_theta=10_000.0)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    values = small_config().to_dict()
    del values["tie_embeddings"]
    assert ModelConfig.from_dict(values) == small_config()
    del values["ffn_dim"]
    with pytest.raises(TrainerUsageError, match="ffn_dim"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_experts", 8), ("dim", "16"), ("dim", 16.5), ("qk_norm", 1), ("num_layers", True), ("norm_eps", None)],
)
def test_unknown_fields_and_wrong_types_are_refused_by_name(name: str, value: object):
    with pytest.raises(TrainerUsageError, match=name):
        ModelConfig.from_dict(small_config().to_dict() | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("vocab_size", 0), ("num_layers", -1), ("max_seq_len", 1.5), ("num_kv_heads", 3)),
        *(("dim", 18), ("dim", 12)),  # Heads of three values cannot be halved.
        *(("rope_theta", float("inf")), ("norm_eps", 0.0)),
    ],
)
def test_values_that_describe_no_model_are_refused_by_name(name: str, value: float):
    with pytest.raises(TrainerUsageError, match=rf"model\.{name}"):
        small_config(**{name: value})


def test_naming_the_packages_and_the_options_does_not_import_torch():
    modules = ("model", "model.config", "model.sizing", "model.plan", "model.subspace.config")
    program = f"import sys, {', '.join(f'trainer.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


TINY = preset("tiny", 2048)


def heaviest(config: ModelConfig, counts: tuple[int, ...]) -> int:
    """Parameters of the stage that has the most, counted in the modules themselves."""
    with torch.device("meta"):
        block, readout = (_num_parameters(part) for part in (make_blocks(config, [0])["0"], Readout(config)))
    ends = [config.vocab_size * config.dim, *[0] * (len(counts) - 2), readout]
    return max(end + count * block for end, count in zip(ends, counts, strict=True))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "num_stages"), [("tiny", 2), ("tiny", 3), ("tiny", 6), ("15m", 4), ("125m", 5)])
def test_by_memory_no_shift_of_a_layer_makes_the_heaviest_stage_lighter(name: str, num_stages: int) -> None:
    config = preset(name, 32_768)
    counts = cut_by_memory(config, num_stages)
    assert sum(counts) == config.num_layers
    least = heaviest(config, counts)
    for giver in range(num_stages):
        for taker in range(num_stages):
            shifted = list(counts)
            shifted[giver] -= 1
            shifted[taker] += 1
            if giver != taker and shifted[giver] >= 0:
                assert heaviest(config, tuple(shifted)) >= least


@given(st.sampled_from(sorted(PRESETS)), st.integers(2, 8), st.sampled_from(["even", "memory"]))
def test_every_layer_is_in_one_stage(name: str, num_stages: int, cut: str) -> None:
    config = preset(name, 32_768)
    if num_stages > config.num_layers:
        return
    plan = StagePlan.of(config, num_stages, cut="memory" if cut == "memory" else "even")
    assert [layer for layers in plan.ranges for layer in layers] == list(range(config.num_layers))
    assert [plan.index(name) for name in plan.names] == list(range(num_stages))
    sizes = [len(layers) for layers in plan.ranges]
    assert cut == "memory" or (sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1)


def test_layers_may_be_given_and_more_bodies_than_layers_cannot_be_had() -> None:
    plan = StagePlan.of(TINY, 3, (0, 4, 0))
    assert plan.ranges == (range(0), range(4), range(4, 4))
    with pytest.raises(TrainerUsageError, match="3 numbers that add up to 4, found \\[1, 1, 1\\]"):
        StagePlan.of(TINY, 3, (1, 1, 1))
    with pytest.raises(TrainerUsageError, match="one of head, body-1, tail, found 'body-2'"):
        plan.index("body-2")
    with pytest.raises(TrainerUsageError, match="at most 4 bodies, found 5"):
        StagePlan.of(TINY, 7, cut="memory")
