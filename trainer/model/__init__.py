"""The model: what a node trains, from its shape to the files other programs read.

A decoder of the Llama family (RMSNorm, rotary positions, SwiGLU, grouped-query attention) with OLMo-2's normalisation
as an option. One machine holding all layers and a pipeline of strangers run the same stage modules.

Guarantees: the whole and its cut into any stages give bit-identical losses and gradients (fp32 on a CPU); the first
weights are a function of seed and parameter name, whatever the cut or the machine; a vocabulary grows without changing
a bit of the rows that were there; an export to Hugging Face gives the same logits in transformers.

The trade-off: projections stay one matrix each and are named after their part, so that stages, growth and export only
rename; a fused query-key-value matrix would save two launches a layer.

What brings torch (1 to 2 s) is imported when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.model.choice import choose_architecture
    from trainer.model.config import ModelConfig
    from trainer.model.cutting import build_model, build_stage, split, stage_ranges
    from trainer.model.export import export_hf
    from trainer.model.growth import VOCAB_STEP, grow_rows, grow_vocabulary, rows_for
    from trainer.model.init import init_weights
    from trainer.model.memory import available_memory_bytes
    from trainer.model.presets import PRESETS, preset
    from trainer.model.sizing import flops_per_token, memory_bytes, num_parameters
    from trainer.model.stages import BodyStage, HeadStage, Stage, TailStage, Transformer

_MODULES = {
    "BodyStage": "stages",
    "HeadStage": "stages",
    "ModelConfig": "config",
    "PRESETS": "presets",
    "Stage": "stages",
    "TailStage": "stages",
    "Transformer": "stages",
    "VOCAB_STEP": "growth",
    "available_memory_bytes": "memory",
    "build_model": "cutting",
    "build_stage": "cutting",
    "choose_architecture": "choice",
    "export_hf": "export",
    "flops_per_token": "sizing",
    "grow_rows": "growth",
    "grow_vocabulary": "growth",
    "init_weights": "init",
    "memory_bytes": "sizing",
    "num_parameters": "sizing",
    "preset": "presets",
    "rows_for": "growth",
    "split": "cutting",
    "stage_ranges": "cutting",
}

__all__ = [
    "PRESETS",
    "VOCAB_STEP",
    "BodyStage",
    "HeadStage",
    "ModelConfig",
    "Stage",
    "TailStage",
    "Transformer",
    "available_memory_bytes",
    "build_model",
    "build_stage",
    "choose_architecture",
    "export_hf",
    "flops_per_token",
    "grow_rows",
    "grow_vocabulary",
    "init_weights",
    "memory_bytes",
    "num_parameters",
    "preset",
    "rows_for",
    "split",
    "stage_ranges",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
