from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manifests import FIRST_MERGE_ID, VocabularyFile
from tests.support.model_configs import random_tokens, small_config
from trainer.model import ModelConfig, Transformer, build_model, export_hf, grow_vocabulary, split
from trainer.model.subspace import SubspaceConfig, SubspaceConstraint, plain_config, plain_state

_OLMO2 = {"qk_norm": True, "reorder_norm": True}
_NORMS = pytest.mark.parametrize("norms", [{}, _OLMO2], ids=["llama", "olmo2"])


def _trained(norms: dict[str, bool], vocab_size: int = 64) -> Transformer:
    """A subspace network no weight of which is at a value that hides a mistake."""
    config: ModelConfig = SubspaceConfig(rank=3).applied_to(small_config(vocab_size=vocab_size, **norms), 1)
    model = build_model(config, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    SubspaceConstraint(model, config).project_()
    return model


@_NORMS
def test_the_plain_model_gives_the_same_logits_bit_for_bit(norms: dict[str, bool]):
    model = _trained(norms)
    plain = Transformer(plain_config(model.config))
    plain.load_state_dict(plain_state(model.state_dict(), model.config))
    ids, _ = random_tokens(64, 2, 16)
    assert plain.config == small_config(**norms)
    assert torch.equal(plain.logits(ids), model.logits(ids))


@_NORMS
def test_stages_become_plain_one_by_one(norms: dict[str, bool]):
    model = _trained(norms)
    whole = plain_state(model.state_dict(), model.config)
    parts = [plain_state(stage.state_dict(), model.config) for stage in split(model, 3)]
    assert sum(map(len, parts)) == len(whole)
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


def test_a_grown_vocabulary_becomes_plain_by_an_older_config():
    model = _trained({})
    older = model.config
    grow_vocabulary(model, 80, 3)
    plain = build_model(plain_config(model.config), 0)
    plain.load_state_dict(plain_state(model.state_dict(), older))
    ids, _ = random_tokens(80, 1, 16)
    assert torch.equal(plain.logits(ids), model.logits(ids))


def test_an_ordinary_model_is_handed_back_as_it_is():
    model = build_model(small_config(), 0)
    state = model.state_dict()
    plain = plain_state(state, model.config)
    assert plain_config(model.config) == model.config
    assert plain is not state and plain.keys() == state.keys()
    assert all(plain[name] is state[name] for name in state)


def test_the_state_given_is_not_changed():
    model = _trained(_OLMO2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = list(state)
    plain_state(state, model.config)
    assert list(state) == names
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@_NORMS
def test_transformers_gives_the_same_logits(norms: dict[str, bool], tmp_path: Path):
    from transformers import AutoModelForCausalLM

    merges = [(114 + 10, 111), (266, 118), (42, 126)]
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(VocabularyFile.from_pairs(merges, {"tiny": len(merges)}).to_json())
    model = _trained(norms, vocab_size=300)
    export_hf(model, model.config, tokenizer, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    num_ids = FIRST_MERGE_ID + len(merges)
    ids, _ = random_tokens(num_ids, 2, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids)[..., :num_ids], rtol=0, atol=1e-5)
