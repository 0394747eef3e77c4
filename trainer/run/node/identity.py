"""Who a node is to the others: its key, and what it announces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.collective import Terms
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint, Identity, load_or_create_identity
from trainer.run.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """What a node announces of its training."""

    inner_step: int = 0
    loss: float | None = None  # Averaged over some 50 steps; None before the first.
    tokens_per_s: float = 0.0
    shards: tuple[int, ...] = ()
    stage: StageReport | None = None


def identity_path(config: RunConfig) -> Path:
    """Returns the file of a node's key: one a node name, so that the nodes of one machine are several peers."""
    return Path(config.state_dir).expanduser() / "identity" / f"{config.node_id}.pem"


def identity_of(config: RunConfig) -> Identity:
    """Reads a node's key, or creates it; raises what `load_or_create_identity` does."""
    return load_or_create_identity(identity_path(config))


def announcement_of(config: RunConfig, endpoint: Endpoint, terms: Terms, stats: NodeStats) -> Announcement:
    """Builds a node's announcement, not stamped yet."""
    certificate = endpoint.certificate
    return Announcement(
        peer_id=endpoint.peer_id,
        node_id=config.node_id,
        run_id=config.run_id,
        address=endpoint.address,
        certificate_pem=certificate.decode() if certificate else "",
        terms_digest=terms.digest(),
        inner_step=stats.inner_step,
        loss=stats.loss,
        tokens_per_s=stats.tokens_per_s,
        shards=stats.shards[:256],
        stage=stats.stage,
    )
