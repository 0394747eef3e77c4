"""First weights of a stage from an existing model: a Hugging Face folder (see `HfFolder`) or a torchtitan checkpoint.

Only the stage's own tensors are read. Rows that the run's vocabulary has beyond the model's get the values they would
have had from the start, so that all workers of a stage begin alike. The caller must know that ids mean the same in both
vocabularies: tensors do not tell.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.stages.dcp import DcpFolder
from trainer.checkpoint.stages.huggingface import CONFIG_NAME, METADATA_NAME, HfFolder, no_model
from trainer.checkpoint.stages.torchtitan import MODEL_NAME, rotated_heads, to_halves, torchtitan_names
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError, TrainerUsageError
from trainer.model import ModelConfig, grow_rows
from trainer.model.init import EMBEDDING, OUTPUT, fill_seeded_, init_std
from trainer.model.plan import StagePlan
from trainer.model.stages import stage_shapes

_BEFORE = {"attention.qkv_linear.": "attention.", "lm_head.weight": "output.weight"}
"""Present names of torchtitan and those before 0.3."""

logger = logging.getLogger(__name__)


def load_initial_state(path: str | Path, plan: StagePlan, stage: str, *, seed: int = 0) -> dict[str, Tensor]:
    """The parameters of a stage, fp32 on the CPU, by their names in the whole model.

    ``path`` is a folder of safetensors with config.json, or of torch.distributed.checkpoint; ``seed`` is for rows that
    it lacks.

    Raises:
        CheckpointMismatchError: the model has another architecture or more ids than the run; or the run trains in a
            subspace, which contains no ordinary model's weights.
        CorruptCheckpointError: it is unreadable.
        CheckpointError: the folder has another form.
    """
    if plan.config.subspace_rank:
        raise CheckpointMismatchError(
            f"{path}: expected a run without a subspace to start from it, found swarm.subspace.rank "
            f"{plan.config.subspace_rank}; an ordinary model's weights are in no subspace"
        )
    folder = Path(path).expanduser()
    if (folder / METADATA_NAME).is_file():
        found = _of_torchtitan(folder, plan, stage)
    elif (folder / CONFIG_NAME).is_file():
        found = _of_huggingface(folder, plan, stage)
    else:
        raise no_model(folder)
    state = {name: _padded(name, tensor.float(), plan.config, seed) for name, tensor in found.items()}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise CorruptCheckpointError(f"{folder}: expected finite weights, found NaN or infinity in {name}")
    return state


def _of_huggingface(folder: Path, plan: StagePlan, stage: str) -> dict[str, Tensor]:
    source = HfFolder(folder)
    source.require(plan.config)
    names, shapes = source.names(plan.config), stage_shapes(plan, stage)
    for name, shape in shapes.items():
        _require_shape(folder, name, source.shape(names[name]), shape)
    return {name: source.read(names[name]) for name in shapes}


def _of_torchtitan(folder: Path, plan: StagePlan, stage: str) -> dict[str, Tensor]:
    source = DcpFolder(folder)
    config = plan.config
    _require_stated(folder, config)
    names, shapes = torchtitan_names(config), stage_shapes(plan, stage)
    there = source.shapes
    # A deeper model has all tensors of a stage too.
    if any(name.removeprefix("model.").startswith(f"layers.{config.num_layers}.") for name in there):
        raise CheckpointMismatchError(f"{folder}: expected a model of {config.num_layers} layers, found more")
    places: dict[str, str] = {}
    for name, shape in shapes.items():
        place = _place(names[name], there)
        if place is None:
            raise CheckpointMismatchError(f"{folder}: expected a tensor {names[name]}, found none")
        _require_shape(folder, name, there[place], shape)
        places[name] = place
    read = source.read(places.values())
    return {name: to_halves(read[place], rotated_heads(name, config)) for name, place in places.items()}


def _place(name: str, there: Mapping[str, object]) -> str | None:
    """The name of a tensor in a checkpoint of any release: at the top or under ``model``, before 0.3 or since."""
    before = name
    for today, former in _BEFORE.items():
        before = before.replace(today, former)
    candidates = [f"{prefix}{each}" for prefix in ("", "model.") for each in (name, before)]
    return next((each for each in candidates if each in there), None)


def _require_stated(folder: Path, config: ModelConfig) -> None:
    """Compares with the architecture beside an export of ours; torchtitan's own checkpoints have none."""
    path = folder / MODEL_NAME
    if not path.is_file():
        logger.info("%s does not state its heads, rope_theta and norm_eps; assuming the run's", folder)
        return
    try:
        stated = ModelConfig.from_dict(json.loads(path.read_bytes())["genesis"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, TrainerUsageError) as error:
        raise CorruptCheckpointError(f"{path}: expected an architecture, found: {str(error)[:120]}") from error
    ours, theirs = config.to_dict(), stated.to_dict()
    counted = sorted((ours.keys() | theirs.keys()) - {"vocab_size", "max_seq_len"})
    stated_otherwise = [name for name in counted if ours.get(name) != theirs.get(name)]
    wrong = [f"{name} {theirs.get(name)!r} (here {ours.get(name)!r})" for name in stated_otherwise]
    if wrong:
        raise CheckpointMismatchError(f"{folder}: expected the run's architecture, found {', '.join(wrong)}")


def _require_shape(folder: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    fewer_rows = name in (EMBEDDING, OUTPUT) and found[1:] == expected[1:] and 0 < found[0] < expected[0]
    if found != expected and not fewer_rows:
        raise CheckpointMismatchError(f"{folder}: expected {name} of shape {expected}, found {found}")


def _padded(name: str, tensor: Tensor, config: ModelConfig, seed: int) -> Tensor:
    """Adds the missing rows of the run's vocabulary."""
    if name not in (EMBEDDING, OUTPUT) or tensor.shape[0] == config.vocab_size:
        return tensor
    grown = grow_rows(tensor, config.vocab_size)
    fill_seeded_(grown.view(-1), seed, name, init_std(name, config), start=tensor.numel())
    return grown
