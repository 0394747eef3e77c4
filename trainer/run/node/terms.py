"""What a run's nodes must have in common, made from a configuration."""

from __future__ import annotations

from pydantic import JsonValue

from manifests import VocabularyFile
from trainer.collective import Terms
from trainer.model import ModelConfig
from trainer.network.rpc.envelope import PROTOCOL_VERSION
from trainer.run.config import RunConfig, to_mapping
from trainer.run.node.vocabulary import lineage_of

__all__ = ["terms_of"]


def terms_of(config: RunConfig, shape: ModelConfig, vocabulary: VocabularyFile) -> Terms:
    """Architecture, vocabulary, and whatever changes the result of a round."""
    architecture: dict[str, JsonValue] = {
        name: value for name, value in shape.to_dict().items() if name != "vocab_size"
    }
    return Terms(
        architecture=architecture,
        tokenizer_lineage=lineage_of(vocabulary),
        synchronisation={
            "protocol": PROTOCOL_VERSION,
            "seed": config.seed,
            "compression": config.collective.compression,
            **{f"diloco.{name}": value for name, value in to_mapping(config.diloco).items()},
            **{f"rule.{name}": value for name, value in to_mapping(config.rule).items()},
        },
    )
