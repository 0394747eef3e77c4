from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.model_configs import small_config
from trainer.model import build_model, init_weights
from trainer.model.init import init_std, truncated_normal

_MANY = 1 << 20


@given(start=st.integers(0, 1000), count=st.integers(0, 300))
def test_any_part_of_the_sequence_can_be_made_alone(start: int, count: int):
    whole = truncated_normal(3, "layers.0", 0, 1400)
    assert np.array_equal(truncated_normal(3, "layers.0", start, count), whole[start : start + count])


def test_values_are_a_normal_cut_at_three_deviations():
    values = truncated_normal(0, "embedding.weight", 0, _MANY).astype(np.float64)
    assert np.abs(values).max() < 3.0
    assert values.mean() == pytest.approx(0, abs=4 / math.sqrt(_MANY))
    assert values.std() == pytest.approx(0.98658, abs=2e-3)
    inside = math.erf(3 / math.sqrt(2))
    for edge in (0.5, 1.0, 2.0, 2.9):
        assert (np.abs(values) < edge).mean() == pytest.approx(math.erf(edge / math.sqrt(2)) / inside, abs=2e-3)


def test_names_and_seeds_give_sequences_that_have_nothing_in_common():
    sequences = [truncated_normal(seed, name, 0, 10_000) for seed in (0, 1) for name in ("a", "b")]
    correlations = np.corrcoef(np.stack(sequences)) - np.eye(4)
    assert np.abs(correlations).max() < 0.05


def test_the_same_bits_everywhere():
    model = build_model(small_config(), seed=7)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    known = "cc3548bf8ae91e424c0076355d7ea0078a981c83bbc44c621974fbbb65ec60be"
    assert digest.hexdigest() == known, "nodes of different releases would not agree on the first state"


def test_deeper_layers_write_less_to_the_residual_stream():
    config = small_config(dim=256, num_layers=3, num_heads=4, ffn_dim=512)
    model = build_model(config, seed=0)
    for name in ("attention.o_proj.weight", "feed_forward.down_proj.weight"):
        stds = [model.get_parameter(f"layers.{number}.{name}").std().item() for number in range(3)]
        narrow = math.sqrt(2 / (5 * 256)) * 0.98658
        assert stds == pytest.approx([narrow / math.sqrt(2 * (number + 1)) for number in range(3)], rel=0.02)
    assert model.get_parameter("layers.2.attention.q_proj.weight").std().item() == pytest.approx(narrow, rel=0.02)
    assert torch.equal(model.readout.norm.weight, torch.ones(256))


def test_the_first_loss_is_that_of_a_guess_and_a_tied_embedding_as_narrow_as_an_output_matrix():
    model = build_model(small_config(dim=64, ffn_dim=128, vocab_size=512), seed=0)
    ids = torch.arange(512).view(16, 32)
    assert model(ids, ids.flip(0)).item() == pytest.approx(math.log(512), rel=0.05)
    stds = init_std("embedding.weight", small_config(tie_embeddings=True)), init_std("lm_head", small_config())
    assert stds[0] == stds[1]


def test_initialising_again_starts_anew():
    model = build_model(small_config(), seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    init_weights(model, model.config, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
