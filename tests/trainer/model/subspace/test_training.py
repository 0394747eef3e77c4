"""What subspace networks are for: 16 times fewer bytes, nothing lost on the way, and nearly nothing learned less."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.support.model_configs import random_tokens
from tests.support.small_store import text_store
from trainer.compression.activations import activation_codec, reconstruction_error
from trainer.model import ModelConfig, Transformer, build_model, split
from trainer.model.subspace import SubspaceConfig, SubspaceConstraint, basis_of, fixed_table_of

_NORMS = pytest.mark.parametrize("olmo2", [False, True], ids=["pre-norm", "re-ordered"])
_SHAPE = ModelConfig(vocab_size=128, dim=128, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=64)
_RANGES = [range(0, 1), range(1, 2), range(2, 3)]


def _replica(config: ModelConfig, saved: list[dict[str, Any]] | None = None) -> tuple[Transformer, torch.optim.AdamW]:
    model = build_model(config, 0)
    constraint = SubspaceConstraint(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    constraint.attach(optimizer)
    if saved is not None:
        model.load_state_dict(saved[0])
        constraint.ensure()
        optimizer.load_state_dict(saved[1])
    return model, optimizer


def _average(models: list[Transformer]) -> None:
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(parameters[1:], parameters[0].clone()) / len(parameters)
            for parameter in parameters:
                parameter.copy_(mean)
    for model in models:
        SubspaceConstraint(model, model.config).ensure()


def _link_errors(model: Transformer) -> list[float]:
    """Of both links of a pipeline of three, after their codec."""
    basis = basis_of(model.config.dim, model.config.subspace_rank, model.config.subspace_seed)
    codec = activation_codec("subspace", basis, fixed_table_of(model.config))
    ids, _ = random_tokens(model.config.vocab_size, 2, 32, seed=99)
    errors, hidden = [], ids
    with torch.no_grad():
        for stage in split(model, _RANGES)[:-1]:
            hidden = stage(hidden)
            encoded = codec.encode(hidden, ids)
            assert encoded.raw_bytes / encoded.wire_bytes == 16.0
            errors.append(reconstruction_error(codec, hidden, ids, encoded))
    return errors


@pytest.mark.slow
@_NORMS
def test_nothing_is_lost_in_a_hundred_steps_with_averages_and_a_reload(olmo2: bool, tmp_path: Path):
    config = SubspaceConfig(rank=8).applied_to(replace(_SHAPE, qk_norm=olmo2, reorder_norm=olmo2), free_layers=1)
    replicas = [_replica(config) for _ in range(2)]
    errors = []
    for step in range(100):
        for number, (model, optimizer) in enumerate(replicas):
            ids, labels = random_tokens(config.vocab_size, 1, 16, seed=2 * step + number)
            model(ids, labels).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 9:
            _average([model for model, _ in replicas])
            errors += _link_errors(replicas[0][0])
        if step == 54:  # Between two averages.
            torch.save([part.state_dict() for part in replicas[0]], tmp_path / "state.pt")
            replicas[0] = _replica(config, torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(errors) == 20 and max(errors) < 1e-5
    assert (
        float(replicas[0][0].get_parameter("layers.0.attention.o_proj.weight").detach().norm()) > 0.1
    )  # It began as zeros.


def _text_ids() -> Tensor:
    shards = sorted(text_store().glob("shard_*.pt"))
    return torch.cat([torch.load(path, weights_only=True).flatten().long() for path in shards])


def _loss_after(config: ModelConfig, ids: Tensor, num_steps: int) -> float:
    """The loss on held-out text after some steps on other text, everything but the subspace alike."""
    lr, rows, tokens = 3e-3, 8, 64
    windows = ids[: len(ids) // (tokens + 1) * (tokens + 1)].view(-1, tokens + 1)
    held_out, training = windows[:64], windows[64:]
    model = build_model(config, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if config.subspace_rank:
        SubspaceConstraint(model, config).attach(optimizer)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
    for step in range(num_steps):
        batch = training[order[rows * step : rows * (step + 1)]]
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / num_steps)
        model(batch[:, :-1], batch[:, 1:]).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(model(held_out[:, :-1], held_out[:, 1:]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "olmo2",
    [
        pytest.param(False, marks=pytest.mark.long, id="pre-norm"),
        pytest.param(True, marks=pytest.mark.long, id="re-ordered"),
    ],
)
def test_a_sixteenth_of_the_bytes_costs_three_percent_of_the_loss_at_most(olmo2: bool):
    ids = _text_ids()
    plain = replace(_SHAPE, vocab_size=1024, num_layers=4, ffn_dim=512, qk_norm=olmo2, reorder_norm=olmo2)
    compressed = SubspaceConfig(rank=8).applied_to(plain, free_layers=2)  # head 1, body 1, tail 2
    losses = [_loss_after(config, ids, 200) for config in (plain, compressed)]
    assert losses[0] < 0.9 * math.log(1024)
    assert losses[1] < 1.03 * losses[0], losses
