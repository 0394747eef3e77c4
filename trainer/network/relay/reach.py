"""How a node's endpoint is reached by way of relays, and relays for others: what it starts and ends with itself."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from trainer.network.relay.client import LinkState, OwnPlace, RelayLinks, ShownCredential
from trainer.network.relay.config import RelayConfig
from trainer.network.relay.server import Relay
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import certificate_digest

logger = logging.getLogger(__name__)


class RelayedReach:
    """See `trainer.network.rpc.endpoint.Reach`; with the defaults of its options it does nothing by itself.

    ``ask_pass`` asks the run's authority for what a relay is shown before this node has a credential.
    """

    def __init__(self, config: RelayConfig, ask_pass: Callable[[], Awaitable[bytes]] | None = None) -> None:
        self._config = config
        self._ask_pass = ask_pass
        self._links: RelayLinks | None = None
        self._endpoint: Endpoint | None = None
        self.relay: Relay | None = None
        """What this node carries for others; None: nothing."""

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
        self._endpoint = endpoint
        if self._config.listen_port:
            self.relay = Relay(self._config, endpoint.admission, endpoint.identity)
            await self.relay.start()
        if not self._config.through:
            return
        links = self._opened()
        for relay in self._config.through:
            links.add(relay)
        if not await links.has_address(self._config.wait_s):
            logger.warning(
                "none of the relays %s answers yet; until one does, others cannot reach this node",
                ", ".join(self._config.through),
            )

    def use(self, relay: str) -> None:
        """Begins to register with a relay that nobody has named to this node; after `start`."""
        if self._endpoint is not None:
            self._opened().add(relay, self._endpoint.dialing)

    async def leave(self, relay: str) -> None:
        """Gives the port of a relay back."""
        if self._links is not None:
            await self._links.drop(relay)

    def states(self) -> tuple[LinkState, ...]:
        """Returns how it stands with each relay."""
        return self._links.states() if self._links is not None else ()

    async def has_address(self, timeout_s: float) -> bool:
        """Waits for an address of a relay; returns whether there is one by then."""
        return self._links is not None and await self._links.has_address(timeout_s)

    async def stop(self) -> None:
        """Ends both sides."""
        links, self._links = self._links, None
        relay, self.relay = self.relay, None
        if links is not None:
            await links.stop()
        if relay is not None:
            await relay.stop()

    def _opened(self) -> RelayLinks:
        endpoint = self._endpoint
        if endpoint is None:
            raise RuntimeError("expected an endpoint that listens, found none; start it first")
        if self._links is None:
            place = OwnPlace(
                identity=endpoint.identity,
                listens_at=(endpoint.listen_host, endpoint.port),
                certificate_sha256=certificate_digest(endpoint.certificate) if endpoint.certificate else "",
                credential=ShownCredential(endpoint.admission, self._ask_pass),
            )
            self._links = RelayLinks(place)
        return self._links
