from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.support.model_configs import random_model, random_tokens, small_config
from trainer.compression.activations import ActivationCodec, activation_codec
from trainer.errors import TrainerUsageError
from trainer.model import (
    BodyStage,
    HeadStage,
    ModelConfig,
    Stage,
    TailStage,
    Transformer,
    build_model,
    build_stage,
    grow_vocabulary,
    init_weights,
    split,
)
from trainer.model.subspace import (
    SubspaceConfig,
    SubspaceConstraint,
    basis_of,
    fixed_table_of,
    plain_config,
    plain_state,
)

_OLMO2 = {"qk_norm": True, "reorder_norm": True}
_RANGES = [range(0, 1), range(1, 3), range(3, 4)]
_NORMS = pytest.mark.parametrize("norms", [{}, _OLMO2], ids=["pre-norm", "re-ordered"])


def _config(free_layers: int = 1, **changes: object) -> ModelConfig:
    return SubspaceConfig(rank=3, seed=5).applied_to(small_config(**changes), free_layers)


def _codec(config: ModelConfig) -> ActivationCodec:
    return activation_codec("subspace", basis_of(config.dim, 3, 5), fixed_table_of(config))


def _through_stages(
    stages: Sequence[Stage], codec: ActivationCodec, ids: Tensor, labels: Tensor
) -> tuple[Tensor, list[float]]:
    """Forward and backward with a link between every two stages; the loss, and each link's largest error."""
    head, body, tail = stages
    assert isinstance(head, HeadStage) and isinstance(body, BodyStage) and isinstance(tail, TailStage)
    made, taken, errors = [head(ids)], [], []
    for stage in (body, tail):
        taken.append(codec.decode(codec.encode(made[-1], ids).tensors, ids).requires_grad_())
        errors.append(float((taken[-1] - made[-1]).detach().abs().max()))
        if stage is body:
            made.append(body(taken[-1]))
    loss = tail(taken[1], labels)
    loss.backward()
    for output, received in ((made[1], taken[1]), (made[0], taken[0])):
        assert received.grad is not None
        output.backward(codec.grad_decode(codec.grad_encode(received.grad).tensors))
    return loss.detach(), errors


@pytest.mark.slow
@_NORMS
def test_a_whole_and_its_cut_with_links_between_train_alike(norms: dict[str, bool]):
    whole = build_model(_config(**norms), 0)
    stages = [build_stage(whole.config, _RANGES, index, 0) for index in range(3)]
    modules = torch.nn.ModuleList(stages)
    codec = _codec(whole.config)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in (whole, modules)]
    for part, optimizer in ((whole, optimizers[0]), *((stage, optimizers[1]) for stage in stages)):
        SubspaceConstraint(part, whole.config).attach(optimizer)
    for step in range(8):
        ids, labels = random_tokens(64, 2, 12, seed=step)
        loss = whole(ids, labels)
        loss.backward()
        with_links, errors = _through_stages(stages, codec, ids, labels)
        assert max(errors) < 1e-5
        torch.testing.assert_close(with_links, loss.detach(), rtol=1e-5, atol=0)
        norms_found = [clip_grad_norm_(module.parameters(), 0.1) for module in (whole, modules)]
        # AdamW divides rounding by small numbers; what stays alike to 1e-5 is the first gradient.
        torch.testing.assert_close(norms_found[0], norms_found[1], rtol=1e-3 if step else 1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for stage in stages:
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], rtol=0, atol=1e-4, msg=name)


@_NORMS
def test_a_stage_built_alone_has_the_bits_it_has_in_the_whole(norms: dict[str, bool]):
    whole = build_model(_config(**norms), 3)
    block = whole.layers["0"]
    for gain in (block.attention_norm.weight, block.feed_forward_norm.weight):
        assert torch.equal(gain, torch.full((16,), (3 / 16) ** 0.5 if norms else 1.0))
        assert gain.requires_grad == (not norms)
    expected = whole.state_dict()
    found = {}
    for index in range(3):
        found |= build_stage(whole.config, _RANGES, index, 3).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert SubspaceConstraint(whole, whole.config).distance() < 1e-6


def test_all_ids_are_told_apart_from_the_start_and_the_fixed_part_is_no_state():
    model = build_model(_config(), 0)
    hidden = model.embedding(torch.arange(64)[None])[0].detach()
    assert torch.equal(hidden, fixed_table_of(model.config))
    assert float(torch.pdist(hidden).min()) > 0.3
    assert {name for name in model.state_dict() if name.startswith("embedding")} == {"embedding.weight"}
    other = Transformer(model.config)  # Its fixed part is there without first weights.
    init_weights(other, model.config, 9)
    other.load_state_dict(model.state_dict())
    ids, _ = random_tokens(64, 1, 8)
    assert torch.equal(other.logits(ids), model.logits(ids))


def test_a_grown_vocabulary_keeps_old_rows_and_has_fixed_ones_for_the_new():
    model = build_model(_config(), 0)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.randn(64, 3) @ basis_of(16, 3, 5).matrix.T)
    trained = copy.deepcopy(model.state_dict())
    old = model.embedding(torch.arange(64)[None])
    assert grow_vocabulary(model, 100, 0) == ("embedding.weight", "readout.output.weight")
    assert torch.equal(model.embedding(torch.arange(64)[None]), old)
    assert torch.equal(model.embedding.weight[:64], trained["embedding.weight"])
    assert torch.equal(model.embedding.weight[64:], torch.zeros(36, 16))
    assert torch.equal(model.embedding(torch.arange(64, 100)[None])[0], fixed_table_of(model.config)[64:])
    ids = torch.tensor([[0, 70, 99]])
    codec, head = _codec(model.config), split(model, _RANGES)[0]
    hidden = head(ids)
    torch.testing.assert_close(codec.decode(codec.encode(hidden, ids).tensors, ids), hidden, rtol=0, atol=1e-5)


def test_a_subspace_networks_config_survives_json_and_an_ordinary_one_says_nothing_of_it():
    config, plain = _config(free_layers=2), small_config()
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    names = {f"subspace_{name}" for name in ("rank", "seed", "free_layers")}
    assert config.to_dict().keys() - plain.to_dict().keys() == names
    assert SubspaceConfig().applied_to(plain, 2) == plain


def test_configs_and_options_that_make_no_sense_are_refused():
    for changes in (
        *({"subspace_rank": rank} for rank in (-1, 16, True)),
        *({"subspace_rank": 2} | more for more in ({"subspace_free_layers": 5}, {"subspace_seed": -1})),
        *({"subspace_seed": 1}, {"subspace_free_layers": 1}, {"subspace_rank": 2, "tie_embeddings": True}),
    ):
        with pytest.raises(TrainerUsageError, match=r"model\.(subspace_|tie_embeddings)"):
            small_config(**changes)
    for name, value in (("rank", -1), ("rank", 1.5), ("seed", -1), ("max_error", 0.0), ("rank", True)):
        with pytest.raises(TrainerUsageError, match=r"subspace\."):
            SubspaceConfig(**{name: value})  # type: ignore[arg-type]


def test_a_boundary_among_free_layers_is_refused():
    config = _config(free_layers=2)
    with pytest.raises(TrainerUsageError, match="subspace_free_layers: expected at most the 1 layers"):
        split(build_model(config, 0), _RANGES)
    with pytest.raises(TrainerUsageError, match="subspace_free_layers"):
        build_stage(config, _RANGES, 0, 0)


def _trained(norms: dict[str, bool]) -> Transformer:
    return random_model(SubspaceConfig(rank=3).applied_to(small_config(**norms), 1))


@_NORMS
def test_the_plain_model_gives_the_same_logits_bit_for_bit_and_stages_become_it_one_by_one(norms: dict[str, bool]):
    model = _trained(norms)
    plain = Transformer(plain_config(model.config))
    whole = plain_state(model.state_dict(), model.config)
    plain.load_state_dict(whole)
    ids, _ = random_tokens(64, 2, 16)
    assert plain.config == small_config(**norms)
    assert torch.equal(plain.logits(ids), model.logits(ids))
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
