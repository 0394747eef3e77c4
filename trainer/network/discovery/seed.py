"""A seed: a DHT node with a persistent identity and port, to begin at, and if it is told so a relay.

It holds no model and belongs to no run, but one that relays for the members of a run is given that run's name and the
keys of its authorities. It then believes their credentials, and looks every 15 s for their lists of revoked peers in
the DHT that it is part of. The trade-off: lists of more than 64 KiB are in no DHT (`record_kinds`); who is in one is
relayed until its credential expires, and refused by all nodes all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genesis.hangup import stop_signals
from trainer.errors import DiscoveryError, RefusedError, TrainerUsageError
from trainer.network.discovery.config import check_seed_address
from trainer.network.discovery.dht import listen_address
from trainer.network.discovery.dht_client import DhtProcess, DhtSettings
from trainer.network.discovery.record_kinds import revoked_key
from trainer.network.relay import Relay
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import RevokedPeers

logger = logging.getLogger(__name__)

_LOOK_UP_INTERVAL_S: Final = 15.0
_LOOK_UP_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedConfig:
    """The address and identity of a seed; seeds should name each other, so that all of them stay one DHT."""

    port: int = 4001
    """TCP port to listen on; 0 takes a free one, which changes with each start."""
    host: str = "0.0.0.0"
    """IP address to listen on."""
    public_host: str = ""
    """IP address others reach it at, if not one of this machine's (behind a router); empty: all it listens on."""
    identity_path: str = "~/.neuroshard/seed.id"
    """File of its key, made at the first start; it keeps the address the same."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of other seeds."""
    start_timeout_s: float = 60.0
    """Seconds it may take to become ready."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise TrainerUsageError(f"port: expected 0 to 65535, found {self.port}")
        if self.public_host and self.port == 0:
            raise TrainerUsageError("public_host: expected a fixed port with it, found port 0")
        for address in self.initial_peers:
            check_seed_address(address)


def seed(
    config: SeedConfig,
    on_ready: Callable[[tuple[str, ...]], None],
    relay: Relay | None = None,
    members: Admission | None = None,
) -> None:
    """Runs a DHT node with a persistent identity and port, to begin at, until SIGINT, SIGTERM or SIGHUP, then returns.

    It may be killed and restarted at any time. ``on_ready`` is called once with the addresses to give to nodes as
    ``--initial-peers``. ``relay`` is started and stopped with it, and ``members``, by whom that admits nodes, hears of
    revoked ones. Raises `DiscoveryError` where it does not become ready; the log says why.
    """
    asyncio.run(_serve_seed(config, on_ready, relay, members))


async def _serve_seed(
    config: SeedConfig, on_ready: Callable[[tuple[str, ...]], None], relay: Relay | None, members: Admission | None
) -> None:
    path = Path(config.identity_path).expanduser()
    if path.is_dir():
        raise DiscoveryError(f"identity_path: expected a file, found the folder {path}")
    settings = DhtSettings(
        parent_pid=os.getpid(),
        initial_peers=config.initial_peers,
        listen=(listen_address(config.host, config.port),),
        announce=(listen_address(config.public_host, config.port),) if config.public_host else (),
        identity_path=str(path.absolute()),
        map_port=not config.host.startswith("127."),
    )
    process = DhtProcess(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    process.start()  # First, since it is what needs an extra.
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(process.wait_ready(config.start_timeout_s, first_start_only=True))
    hearing = asyncio.create_task(_hear_forever(process, members))
    try:
        if relay is not None:
            await relay.start()
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await starting
            on_ready((await process.status(10.0)).addresses)
        await stop.wait()
    finally:
        for task in (stopping, starting, hearing):
            task.cancel()
        await asyncio.gather(stopping, starting, hearing, return_exceptions=True)
        await process.close()
        if relay is not None:
            await relay.stop()
    logger.info("the seed has stopped")


async def _hear_forever(process: DhtProcess, members: Admission | None) -> None:
    """Takes lists of revoked peers from the DHT; returns at once where none matter."""
    while members is not None:
        try:
            await hear_revocations(process, members)
        except DiscoveryError as error:
            logger.debug("lists of revoked peers in the DHT: %s", error)
        except Exception:
            # Whatever stands in the DHT: a relay that hears no more lists would carry for those who are revoked.
            logger.exception("lists of revoked peers in the DHT")
        await asyncio.sleep(_LOOK_UP_INTERVAL_S)


async def hear_revocations(process: DhtProcess, members: Admission) -> None:
    """Looks once; a list counts by its authority's signature and number. Raises `DiscoveryError`."""
    records, _ = await process.get(revoked_key(members.run_name), _LOOK_UP_S)
    for record in records:
        if record.subkey in members.authorities:  # Anybody may store one that he has signed himself.
            with contextlib.suppress(RefusedError):
                members.revoke(RevokedPeers.parse(record.value.encode()))
