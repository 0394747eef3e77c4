"""A bootstrap peer: a DHT node with a persistent identity and port, so that its address survives a restart.

It trains nothing and stores only unexpired announcements (`AnnouncementValidator`), so it may be killed and restarted
at any time: the nodes dial it again within seconds and store their announcements there anew. Seeds should name each
other as initial peers, so that all of them stay one DHT.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.network.discovery.config import check_seed_address
from trainer.network.discovery.dht import listen_address
from trainer.network.discovery.dht_client import DhtProcess
from trainer.network.discovery.dht_messages import DhtSettings

__all__ = ["SeedConfig", "seed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedConfig:
    """The address and identity of a seed."""

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


def seed(config: SeedConfig, on_ready: Callable[[tuple[str, ...]], None]) -> None:
    """Runs a seed until SIGINT or SIGTERM, then returns.

    Args:
        config: its address and identity.
        on_ready: is called once with the addresses to give to nodes as ``--initial-peers``.

    Raises:
        DiscoveryError: it did not become ready; the log says why (the port is taken, for one).
    """
    asyncio.run(_serve(config, on_ready))


async def _serve(config: SeedConfig, on_ready: Callable[[tuple[str, ...]], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    process = DhtProcess(_settings(config))
    process.start()
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(process.wait_ready(config.start_timeout_s, first_start_only=True))
    try:
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await starting
            on_ready((await process.status(10.0)).addresses)
        await stop.wait()
    finally:
        for task in (stopping, starting):
            task.cancel()
        await asyncio.gather(stopping, starting, return_exceptions=True)
        await process.close()
    logger.info("the seed has stopped")


def _settings(config: SeedConfig) -> DhtSettings:
    public = listen_address(config.public_host, config.port) if config.public_host else ""
    path = Path(config.identity_path).expanduser()
    if path.is_dir():
        raise DiscoveryError(f"identity_path: expected a file, found the folder {path}")
    return DhtSettings(
        parent_pid=os.getpid(),
        initial_peers=config.initial_peers,
        listen=(listen_address(config.host, config.port),),
        announce=(public,) if public else (),
        identity_path=str(path.absolute()),
        map_port=not config.host.startswith("127."),
    )
