"""The inner optimizer: AdamW with two groups of parameters, and its learning rate as a function of the step.

The fall of the rate ends AT ``decay_end_step``, counted from the beginning of the run (spec T-7). At step 0 the rate is
0, so the first step changes nothing but the moments. The fused kernel (CPU and CUDA) does a step in one pass over
memory instead of a dozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.inner.config import InnerConfig


def lr_at(step: int, config: InnerConfig) -> float:
    """Returns the learning rate of a step, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min((step - config.warmup_steps) / (config.decay_end_step - config.warmup_steps), 1.0)
    remaining = (1.0 + math.cos(math.pi * progress)) / 2.0 if config.schedule == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


def make_optimizer(model: nn.Module, config: InnerConfig) -> AdamW:
    """Builds AdamW over a model's, or a stage's, trainable parameters; first the group with decay.

    The model must be on its final device: a parameter that is moved afterwards is lost to the optimizer.
    """
    decayed, plain = parameter_groups(model)
    parameters = decayed + plain
    if not parameters:
        raise TrainerUsageError("expected a model with trainable parameters, found none; is all of it frozen?")
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True if fused else None,
    )


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters that decay, and those of norms (modules named so) or of one dimension."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            without = parameter.ndim < 2 or id(parameter) in of_norms
            (plain if without else decayed).append(parameter)
    return decayed, plain


def state_for(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved state for ``load_state_dict``, under the optimizer's own rates, betas, decay and kernels.

    Raises CheckpointMismatchError if it belongs to parameters of other numbers or shapes.
    """
    own = optimizer.state_dict()
    sizes, saved_sizes = ([len(group["params"]) for group in each["param_groups"]] for each in (own, saved))
    if sizes != saved_sizes:
        raise CheckpointMismatchError(
            f"expected an optimizer of {sizes} parameters by group, found one of {saved_sizes}; is it of another model?"
        )
    groups = [
        {**group, "params": list(was["params"])}
        for group, was in zip(own["param_groups"], saved["param_groups"], strict=True)
    ]
    state = {key: dict(saved["state"].get(key, {})) for group in groups for key in group["params"]}
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter, key in zip(live["params"], group["params"], strict=True):
            for name, value in state[key].items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                    raise CheckpointMismatchError(
                        f"optimizer state {name} of parameter {key}: expected shape {tuple(parameter.shape)}, found "
                        f"{tuple(value.shape)}; is it of another model, or of a vocabulary that has grown?"
                    )
    return {"state": {key: values for key, values in state.items() if values}, "param_groups": groups}
