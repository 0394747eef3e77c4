"""How a node's endpoint is reached by way of relays, and relays for others: what it starts and ends with itself."""

from __future__ import annotations

import logging

from trainer.network.relay.client import RelayLinks
from trainer.network.relay.config import RelayConfig
from trainer.network.relay.server import Relay
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import certificate_digest

logger = logging.getLogger(__name__)


class RelayedReach:
    """See `trainer.network.rpc.endpoint.Reach`; with the defaults of its options it does nothing."""

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._links: RelayLinks | None = None
        self._relay: Relay | None = None

    @property
    def address(self) -> str:
        """Where others reach the node, if not at its own address; empty: there, or no relay answers yet."""
        return self._links.address if self._links is not None else ""

    @property
    def relayed_bytes(self) -> tuple[int, int]:
        """Bytes of this node sent and received by way of relays."""
        return self._links.carried_bytes if self._links is not None else (0, 0)

    def may_be_caller(self, remote_host: str) -> bool:
        """Whether whoever comes from this address may have come by way of a relay, from anywhere."""
        return self._links is not None and self._links.may_be_caller(remote_host)

    async def start(self, endpoint: Endpoint) -> None:
        """Registers with the relays, once ``endpoint`` listens; raises TrainerUsageError: the own port is taken."""
        if self._config.port:
            self._relay = Relay(self._config)
            await self._relay.start()
        if not self._config.through:
            return
        certificate = certificate_digest(endpoint.certificate) if endpoint.certificate else ""
        self._links = RelayLinks(
            self._config.through, endpoint.identity, (endpoint.listen_host, endpoint.port), certificate
        )
        if not await self._links.start(self._config.wait_s):
            logger.warning(
                "none of the relays %s answers yet; until one does, others cannot reach this node",
                ", ".join(self._config.through),
            )

    async def stop(self) -> None:
        """Ends both sides."""
        links, self._links = self._links, None
        relay, self._relay = self._relay, None
        if links is not None:
            await links.stop()
        if relay is not None:
            await relay.stop()
