from __future__ import annotations

import copy
import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import FIRST_MERGE_ID
from tests.support.model_configs import random_tokens, small_config
from trainer.errors import TrainerUsageError
from trainer.model import VOCAB_STEP, build_model, grow_rows, grow_vocabulary, rows_for, split
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


_GROWING = ("embedding.weight", "readout.output.weight")


@pytest.mark.slow
@given(st.integers(FIRST_MERGE_ID, 10_000_000))
def test_rows_are_the_next_full_step(next_merge_id: int):
    rows = rows_for(next_merge_id)
    assert rows % VOCAB_STEP == 0
    assert next_merge_id <= rows < next_merge_id + VOCAB_STEP


@pytest.mark.slow
@settings(max_examples=15)
@given(steps=st.lists(st.integers(64, 400), max_size=4).map(sorted), seed=st.integers(0, 3), tied=st.booleans())
def test_growing_in_any_steps_keeps_old_rows_and_gives_the_rows_a_larger_model_begins_with(steps, seed, tied):
    model = build_model(small_config(tie_embeddings=tied), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # trained since
    trained = copy.deepcopy(model.state_dict())
    for rows in steps:
        grow_vocabulary(model, rows, seed)
    final = max([64, *steps])
    fresh = build_model(small_config(tie_embeddings=tied, vocab_size=final), seed).state_dict()
    assert model.config.vocab_size == final
    for name, value in model.state_dict().items():
        if name in _GROWING:
            assert torch.equal(value[:64], trained[name])
            assert torch.equal(value[64:], fresh[name][64:])
        else:
            assert torch.equal(value, trained[name])


def test_growth_keeps_the_parameters_that_an_optimizer_refers_to():
    model = build_model(small_config(), 0)
    ids, labels = random_tokens(64, 4, 16)
    before, logits = dict(model.named_parameters()), model(ids).detach()
    model(ids, labels).backward()
    assert grow_vocabulary(model, 64, 0) == () and model.embedding.weight.grad is not None
    assert grow_vocabulary(model, 100, 0) == _GROWING
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.embedding.weight.grad is None
    torch.testing.assert_close(model(ids)[..., :64], logits)
    model(*random_tokens(100, 4, 16)).backward()
    assert model.embedding.weight.grad.shape == (100, 16)


def test_stages_grow_what_they_have():
    whole = build_model(small_config(), 2)
    grow_vocabulary(whole, 128, 2)
    stages = split(build_model(small_config(), 2), 3)
    names = [grow_vocabulary(stage, 128, 2) for stage in stages]
    assert names == [("embedding.weight",), (), ("readout.output.weight",)]
    parts = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert all(torch.equal(value, parts[name]) for name, value in whole.state_dict().items())
    assert [stage.config for stage in stages] == [whole.config] * 3


def test_what_cannot_grow_is_refused():
    """Fewer ids than there are bytes, a vocabulary that would shrink, tensors of more rows or of none."""
    with pytest.raises(TrainerUsageError, match="266, found 265"):
        rows_for(265)
    with pytest.raises(TrainerUsageError, match="at least the present 64, found 63"):
        grow_vocabulary(build_model(small_config(), 0), 63, 0)
    for tensor in (torch.zeros(5, 2), torch.tensor(1.0)):
        with pytest.raises(TrainerUsageError, match="at most 4 rows"):
            grow_rows(tensor, 4)
