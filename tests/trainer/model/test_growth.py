from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import FIRST_MERGE_ID
from tests.support.model_configs import random_tokens, small_config
from trainer.errors import TrainerUsageError
from trainer.model import VOCAB_STEP, build_model, grow_rows, grow_vocabulary, init_weights, rows_for, split

_GROWING = ("embedding.weight", "readout.output.weight")


@pytest.mark.slow
@given(st.integers(FIRST_MERGE_ID, 10_000_000))
def test_rows_are_the_next_full_step(next_merge_id: int):
    rows = rows_for(next_merge_id)
    assert rows % VOCAB_STEP == 0
    assert next_merge_id <= rows < next_merge_id + VOCAB_STEP


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.integers(64, 400), max_size=4).map(sorted), seed=st.integers(0, 3), tied=st.booleans())
def test_growing_in_any_steps_keeps_old_rows_and_gives_the_rows_a_larger_model_begins_with(
    steps: list[int], seed: int, tied: bool
):
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


def test_an_optimizer_goes_on_with_the_grown_model():
    model = build_model(small_config(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids, labels = random_tokens(64, 4, 16)
    model(ids, labels).backward()
    optimizer.step()
    moments = optimizer.state[model.embedding.weight]["exp_avg"].clone()
    logits = model(ids).detach()
    names = grow_vocabulary(model, 100, 0)
    for name in names:
        state = optimizer.state[model.get_parameter(name)]
        state |= {key: grow_rows(state[key], 100) for key in ("exp_avg", "exp_avg_sq")}
    assert names == _GROWING
    assert model.embedding.weight.grad is None
    torch.testing.assert_close(model(ids)[..., :64], logits)
    ids, labels = random_tokens(100, 4, 16)
    new_rows = model.embedding.weight.detach()[64:].clone()
    optimizer.zero_grad()
    model(ids, labels).backward()
    optimizer.step()
    grown = optimizer.state[model.embedding.weight]["exp_avg"]
    assert grown.shape == (100, 16)
    assert not torch.equal(grown[:64], moments)
    assert not torch.equal(model.embedding.weight[64:], new_rows)


def test_stages_grow_what_they_have():
    config = small_config()
    whole = build_model(config, 2)
    grow_vocabulary(whole, 128, 2)
    stages = split(build_model(config, 2), 3)
    names = [grow_vocabulary(stage, 128, 2) for stage in stages]
    assert names == [("embedding.weight",), (), ("readout.output.weight",)]
    parts = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert all(torch.equal(value, parts[name]) for name, value in whole.state_dict().items())
    assert [stage.config for stage in stages] == [whole.config] * 3


def test_a_grown_model_loads_into_one_built_at_that_size():
    grown = build_model(small_config(), 0)
    grown(*random_tokens(64, 1, 4)).backward()
    assert grow_vocabulary(grown, 64, 0) == ()
    assert grown.embedding.weight.grad is not None
    grow_vocabulary(grown, 90, 0)
    other = build_model(grown.config, 5)
    other.load_state_dict(grown.state_dict())
    ids, labels = random_tokens(90, 2, 8)
    assert torch.equal(other(ids, labels), grown(ids, labels))
    init_weights(other, other.config, 0)
    assert torch.equal(other.embedding.weight, grown.embedding.weight)


@given(rows=st.integers(0, 9), more=st.integers(0, 9), width=st.integers(0, 4))
def test_tensors_beside_the_model_grow_by_zeros(rows: int, more: int, width: int):
    tensor = torch.randn(rows, width)
    grown = grow_rows(tensor, rows + more)
    assert torch.equal(grown[:rows], tensor)
    assert torch.equal(grown[rows:], torch.zeros(more, width))
    assert grown.data_ptr() != tensor.data_ptr() or tensor.numel() == 0


def test_what_cannot_grow_is_refused():
    """Fewer ids than there are bytes, a vocabulary that would shrink, tensors of more rows or of none."""
    with pytest.raises(TrainerUsageError, match="266, found 265"):
        rows_for(265)
    with pytest.raises(TrainerUsageError, match="at least the present 64, found 63"):
        grow_vocabulary(build_model(small_config(), 0), 63, 0)
    for tensor in (torch.zeros(5, 2), torch.tensor(1.0)):
        with pytest.raises(TrainerUsageError, match="at most 4 rows"):
            grow_rows(tensor, 4)
