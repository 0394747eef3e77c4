"""What a node announces: its progress, the digest of its terms, and the fields that all nodes have in common."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from manifests import VocabularyFile
from trainer.collective import Terms
from trainer.model import ModelConfig
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint
from trainer.network.rpc.envelope import PROTOCOL_VERSION
from trainer.run.config import RunConfig, to_mapping
from trainer.run.node.vocabulary import lineage_of

__all__ = ["NodeProgress", "announcement_of", "terms_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """What an announcement says of training."""

    inner_step: int = 0
    """Inner steps this node has done."""
    loss: float | None = None
    """Averaged over some 50 steps; None before the first."""
    tokens_per_s: float = 0.0
    shards: tuple[int, ...] = ()
    """What it reads in this epoch."""
    stage: StageReport | None = None
    """What a worker holds of a pipeline, and how it is doing."""


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


def announcement_of(config: RunConfig, endpoint: Endpoint, terms: Terms, progress: NodeProgress) -> Announcement:
    """An announcement that is not stamped yet.

    Args:
        config: of the run.
        endpoint: where the node is reached.
        terms: what it trains by.
        progress: how far it is.
    """
    certificate = endpoint.certificate
    return Announcement(
        peer_id=endpoint.peer_id,
        node_id=config.node_id,
        run_id=config.run_id,
        address=endpoint.address,
        certificate_pem=certificate.decode() if certificate else "",
        terms_digest=terms.digest(),
        inner_step=progress.inner_step,
        loss=progress.loss,
        tokens_per_s=progress.tokens_per_s,
        shards=progress.shards[:256],
        stage=progress.stage,
    )
