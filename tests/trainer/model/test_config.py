from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from tests.support.model_configs import small_config
from trainer.errors import TrainerUsageError
from trainer.model import ModelConfig


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
    names = ("model", "model.config", "model.sizing", "model.plan", "model.subspace.config", "compression.activations")
    program = f"import sys, {', '.join(f'trainer.{name}' for name in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["trainer.model", "trainer.compression.activations", "trainer.model.subspace"])
def test_every_public_name_is_there(name: str) -> None:
    package = importlib.import_module(name)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="Perceptron"):
        _ = package.Perceptron
