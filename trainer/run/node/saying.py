"""What a node of a run says of itself, whatever its part in it: the fields of an announcement that all of them have."""

from __future__ import annotations

from trainer.collective import Terms
from trainer.network.discovery import Announcement
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig
from trainer.run.node.progress import Progress

__all__ = ["announcement_of"]


def announcement_of(config: RunConfig, endpoint: Endpoint, terms: Terms, progress: Progress) -> Announcement:
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
