"""The process that runs hivemind's DHT, with a node that stores announcements and signed records and nothing else.

It is a process of its own because hivemind brings a Go daemon, its own logging and 2 s of imports, and because a hang
or crash in it must not stop training. It joins the seeds again and again, instead of once as hivemind does: else two
halves of a run would never meet after all seeds were down. It ends within seconds when standard input closes or the
parent dies (SIGKILL included), together with the daemon. It logs ``LEVEL message`` to standard error.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio import StreamReader, StreamReaderProtocol
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import hivemind.dht.node
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time
from pydantic import ValidationError

from genesis.hangup import stop_signals
from trainer.errors import DiscoveryError
from trainer.network.discovery.announcement import AnnouncementRefusedError
from trainer.network.discovery.dht_client import (
    MAX_LINE_BYTES,
    MAX_RECORDS,
    MAX_VALUE_BYTES,
    DhtReply,
    DhtRequest,
    DhtSettings,
    Record,
)
from trainer.network.discovery.dht_quotas import Place, RecordQuotas
from trainer.network.discovery.node_report import DhtTraffic, ReportRefusedError
from trainer.network.discovery.parent import die_with_parent
from trainer.network.discovery.record_kinds import check_stored
from trainer.network.discovery.records import RecordRefusedError
from trainer.network.rpc.dialing import address_group
from trainer.network.rpc.token_buckets import remember

logger = logging.getLogger(__name__)

Send = Callable[[DhtReply], None]

_MAX_CLOCK_SKEW_S = 300.0
_MAX_ACCEPTED = 16_384
_MAX_GONE = 1024
_SWEEP_INTERVAL_S = 5.0
_MAX_CONCURRENT = 64
_STOP_TIMEOUT_S = 5.0
_GIVE_UP_S = 1.0
_PARENT_CHECK_INTERVAL_S = 2.0


class StoredRecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts what the table of `record_kinds` has: signed, under its own name and run, within its bounds.

    Expired announcements and reports pass: hivemind drops those itself, and refusing one here refuses the whole reply
    it came in. Accepted records are not verified again.
    """

    def __init__(self) -> None:
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Returns whether to accept a record; hivemind calls this for each that it stores or receives."""
        fields = (record.key, record.subkey, record.value, repr(record.expiration_time).encode())
        digest = hashlib.sha256(b"".join(len(it).to_bytes(4) + it for it in fields)).digest()
        if digest in self._accepted:
            return True
        try:
            wire = MSGPackSerializer.loads(record.value)
            subkey = MSGPackSerializer.loads(record.subkey)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's bytes make msgpack raise
            logger.debug("a DHT record that is not msgpack: %s", error)
            return False
        if not (isinstance(wire, bytes) and isinstance(subkey, str)):
            return False
        try:
            key = check_stored(
                wire, subkey, record.expiration_time, now=time.time(), max_clock_skew_s=_MAX_CLOCK_SKEW_S
            )
        except (AnnouncementRefusedError, RecordRefusedError, ReportRefusedError) as error:
            logger.debug("a DHT record refused: %s", error)
            return False
        if DHTID.generate(key).to_bytes() != record.key:
            return False
        remember(self._accepted, digest, None, _MAX_ACCEPTED)
        return True


_stored_by: ContextVar[str] = ContextVar("stored_by", default="")
"""The host of the DHT node whose request is being served; empty: this one."""


class _AttributingProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's protocol, which does not tell its storage who stores a record nor counts, extended by both."""

    num_stores = num_finds = 0  # Requests of others since the start; assigned to the instance.

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        self.num_finds += 1
        return await super().rpc_find(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        self.num_stores += 1
        _stored_by.set(await self._host_of(context.remote_id))
        return await super().rpc_store(request, context)

    async def _host_of(self, peer_id: PeerID) -> str:
        hosts: dict[PeerID, str] = getattr(self, "_hosts", {})
        if peer_id not in hosts:
            hosts = {}
            for peer in await self.p2p.list_peers():
                named = [it[kind] for it in peer.addrs for kind in ("ip4", "ip6") if kind in it]
                hosts[peer.peer_id] = address_group(named[0]) if named else ""
            self._hosts = hosts
        return hosts.get(peer_id, str(peer_id))


_AttributingProtocol.__name__ = DHTProtocol.__name__  # It is part of the RPC names.


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage within quotas."""

    def __init__(self, quotas: RecordQuotas) -> None:
        super().__init__()
        self._quotas = quotas
        self._swept_s = 0.0

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Does what hivemind's does, if there is room or some can be made."""
        self._sweep()
        known = self.get(key)
        records = known.value if known is not None and isinstance(known.value, DictionaryDHTValue) else None
        before = None if records is None else records.get(subkey)
        if (before is not None and before.expiration_time >= expiration_time) or expiration_time < get_dht_time():
            return False
        dropped = self._quotas.admit(key.to_bytes(), subkey, len(value), _stored_by.get())
        if dropped is None:
            return False
        self._drop(dropped)
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def _sweep(self) -> None:
        now_s = time.monotonic()
        if now_s - self._swept_s < _SWEEP_INTERVAL_S:
            return
        self._swept_s = now_s
        self._drop(self._quotas.overdue())
        # hivemind would keep the expiry times of removed records until they come.
        values = [known.value for known in self.data.values() if isinstance(known.value, DictionaryDHTValue)]
        for storage in (self, *values):
            if len(storage.expiration_heap) > 2 * len(storage.data) + _MAX_GONE:
                storage.expiration_heap = list(storage.key_to_heap.values())
                heapq.heapify(storage.expiration_heap)

    def _drop(self, places: list[Place]) -> None:
        for key, subkey in places:
            known = self.data.get(DHTID.from_bytes(key))
            if known is not None and isinstance(known.value, DictionaryDHTValue):
                del known.value[subkey]
                if not known.value.data:
                    del self[DHTID.from_bytes(key)]


class AnnouncementNode:
    """hivemind's node, loops that look for others, and its libp2p daemon; see `start`."""

    def __init__(self, settings: DhtSettings, node: DHTNode) -> None:
        self._settings = settings
        self._node = node
        self._tasks = [asyncio.create_task(loop()) for loop in (self._rejoin_forever, self._refresh_forever)]

    @classmethod
    async def start(cls, settings: DhtSettings) -> AnnouncementNode:
        """Starts daemon and node, which joins the seeds a moment later; raises `DiscoveryError` for a taken port."""
        for address in settings.listen:
            _check_port_is_free(Multiaddr(address))
        if settings.identity_path is not None:
            _make_identity(Path(settings.identity_path))
        if settings.socket_folder:
            P2P._UNIX_SOCKET_PREFIX = f"/unix{settings.socket_folder}/"
        # hivemind leaves its daemon behind when its own process is killed.
        die_with_us = functools.partial(die_with_parent, signal.SIGKILL)
        start_process = functools.partial(asyncio.subprocess.create_subprocess_exec, preexec_fn=die_with_us)
        asyncio.subprocess.create_subprocess_exec = start_process
        hivemind.dht.node.DHTProtocol = _AttributingProtocol
        node = await DHTNode.create(
            host_maddrs=list(settings.listen),
            announce_maddrs=list(settings.announce) or None,
            identity_path=settings.identity_path,
            check_if_identity_free=False,
            client_mode=settings.client_mode,
            no_listen=settings.client_mode,
            nat_port_map=settings.map_port,
            record_validator=StoredRecordValidator(),
            refresh_timeout=None,  # See `_refresh_forever`.
            # Every look-up asks for the newest record, which is never in a cache.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        node.protocol.storage = BoundedStorage(RecordQuotas())
        return cls(settings, node)

    async def serve(self, requests: StreamReader, send: Send) -> None:
        """Serves until standard input ends; cancels running requests before the node they need stops."""
        send(DhtReply(id=0, addresses=await self._addresses()))
        slots = asyncio.Semaphore(_MAX_CONCURRENT)
        running: set[asyncio.Task[None]] = set()
        try:
            while line := await requests.readline():
                try:
                    request = DhtRequest.model_validate_json(line)
                except ValidationError as error:
                    logger.error("unreadable request: %s", error.errors(include_input=False)[0]["msg"])
                    continue
                await slots.acquire()
                task = asyncio.create_task(self._handle(request, send))
                running.add(task)
                task.add_done_callback(running.discard)
                task.add_done_callback(lambda _: slots.release())
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=_GIVE_UP_S)

    async def _handle(self, request: DhtRequest, send: Send) -> None:
        fields: dict[str, Any] = {}
        try:
            async with asyncio.timeout(request.timeout_s):
                if request.op == "get":
                    fields["records"], fields["skipped"] = await self._get(request.key)
                elif request.op == "status":
                    fields["addresses"] = await self._addresses()
                elif not await self._node.store(
                    request.key, request.value.encode(), request.expires_at, subkey=request.subkey
                ):
                    fields["error"] = "no DHT node took the record"
        except TimeoutError:
            fields["error"] = f"no answer of the DHT within {request.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - hivemind raises anything; the parent gets the text
            fields["error"] = f"{type(error).__name__}: {error}"[:500]
        protocol = self._node.protocol
        num_neighbours = len(protocol.routing_table.uid_to_peer_id)
        send(DhtReply(id=request.id, num_neighbours=num_neighbours, traffic=_traffic(protocol), **fields))

    async def _get(self, key: str) -> tuple[tuple[Record, ...], int]:
        """Returns the newest record of each subkey, and how many were left out as too long, not text, or too many."""
        found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return (), 0 if found is None else 1
        records: list[Record] = []
        # At random, so that in time all get through, however many there are.
        for subkey, entry in random.sample(items := list(found.value.items()), len(items)):
            record = _record(subkey, entry.value)
            if record is not None and len(records) < MAX_RECORDS:
                records.append(record)
        return tuple(records), len(found.value) - len(records)

    async def _addresses(self) -> tuple[str, ...]:
        """Returns the addresses it is reached at, with its peer id; empty for a client."""
        if self._settings.client_mode:
            return ()
        return tuple(str(address) for address in await self._node.get_visible_maddrs(latest=True))

    async def stop(self, timeout_s: float) -> None:
        """Stops node and daemon; raises `TimeoutError` where that takes longer."""
        for task in self._tasks:
            task.cancel()
        async with asyncio.timeout(timeout_s):
            await asyncio.wait(self._tasks, timeout=timeout_s / 2)
            await self._node.shutdown()

    async def _rejoin_forever(self) -> None:
        seeds = [Multiaddr(address) for address in self._settings.initial_peers]
        while seeds:
            joined = [await self._rejoin(seed) for seed in seeds]
            if any(joined):
                await self._look_for([self._node.node_id])
            await asyncio.sleep(self._settings.rejoin_interval_s)

    async def _refresh_forever(self) -> None:
        """Looks for nodes where the routing table had no contact lately; hivemind 1.1.12's own task fails there."""
        interval_s = self._settings.refresh_interval_s
        while True:
            await asyncio.sleep(interval_s)
            stale_before = get_dht_time() - interval_s
            stale = [it for it in self._node.protocol.routing_table.buckets if it.last_updated < stale_before]
            await self._look_for([DHTID(random.randint(bucket.lower, bucket.upper - 1)) for bucket in stale])

    async def _look_for(self, ids: list[DHTID]) -> None:
        try:
            if ids:
                await self._node.find_nearest_nodes(ids)
        except Exception as error:  # noqa: BLE001 - peers that are gone raise nothing here; what does is logged
            logger.warning("looking for nodes failed: %s: %s", type(error).__name__, error)

    async def _rejoin(self, seed: Multiaddr) -> bool:
        """Joins a seed that is not in the routing table; returns whether it is new there."""
        peer_id = PeerID.from_base58(seed["p2p"])
        table = self._node.protocol.routing_table
        if peer_id == self._node.peer_id or peer_id in table.peer_id_to_uid:
            return False
        timeout_s = self._settings.rejoin_interval_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._node.p2p._client.connect(peer_id, [Multiaddr(str(seed).partition("/p2p/")[0])])
            async with asyncio.timeout(timeout_s):
                return await self._node.protocol.call_ping(peer_id) is not None
        except Exception as error:  # noqa: BLE001 - a seed that is down fails in many ways, and is retried
            logger.debug("the seed %s cannot be reached: %s", seed, error)
            return False


def _traffic(protocol: Any) -> DhtTraffic:
    stored = [known.value for known in protocol.storage.data.values()]
    num_records = sum(len(value) if isinstance(value, DictionaryDHTValue) else 1 for value in stored)
    return DhtTraffic(stores=protocol.num_stores, finds=protocol.num_finds, records=num_records)


def _record(subkey: Any, value: Any) -> Record | None:
    is_short = isinstance(subkey, str) and len(subkey) <= 256
    if not (is_short and isinstance(value, bytes) and len(value) <= MAX_VALUE_BYTES):
        return None
    try:
        return Record(subkey=subkey, value=value.decode())
    except UnicodeDecodeError:
        return None


def _check_port_is_free(address: Multiaddr) -> None:
    """Checks a port, since the daemon listens with SO_REUSEPORT: on one in use it would silently share connections."""
    version = "ip6" if "ip6" in address else "ip4"
    host, port = address[version], int(address["tcp"])
    with socket.socket(socket.AF_INET6 if version == "ip6" else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DiscoveryError(f"{host}:{port} is taken or not of this machine ({error}); choose another") from None


def _make_identity(path: Path) -> None:
    """Makes the key file atomically: half a key would stop every later start."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".identity-") as folder:
        new = Path(folder) / "key"
        P2P.generate_identity(str(new))
        new.replace(path)


def _write(descriptor: int, reply: DhtReply) -> None:
    data = memoryview(reply.model_dump_json().encode() + b"\n")
    while data:  # The parent always reads; a pipe that is full for a moment may block this process.
        data = data[os.write(descriptor, data) :]


async def _run(send: Send) -> None:
    loop = asyncio.get_running_loop()
    requests = StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: StreamReaderProtocol(requests), sys.stdin)
    settings = DhtSettings.model_validate_json(await requests.readline())
    serving = asyncio.create_task(_run_node(settings, requests, send))
    for number in stop_signals():
        loop.add_signal_handler(number, serving.cancel)
    watching = asyncio.create_task(_watch_parent(settings.parent_pid, serving))
    try:
        await serving
    except asyncio.CancelledError:
        logger.info("stopped by a signal")
    finally:
        watching.cancel()
        if settings.socket_folder:
            shutil.rmtree(settings.socket_folder, ignore_errors=True)


async def _run_node(settings: DhtSettings, requests: StreamReader, send: Send) -> None:
    node = await AnnouncementNode.start(settings)
    try:
        await node.serve(requests, send)
    finally:
        await node.stop(_STOP_TIMEOUT_S)


async def _watch_parent(parent_pid: int, serving: asyncio.Task[None]) -> None:
    """Covers a fork of the dead parent that holds standard input open, and kernels without a parent-death signal."""
    while os.getppid() == parent_pid:
        await asyncio.sleep(_PARENT_CHECK_INTERVAL_S)
    serving.cancel()


def main() -> int:
    """Runs until the parent closes standard input or ends; returns 0, or 1 if the node did not start or stop."""
    die_with_parent(signal.SIGTERM)
    send = functools.partial(_write, os.dup(1))
    os.dup2(2, 1)  # Everything printed goes into the log.
    use_hivemind_log_handler("nowhere")  # All logging, hivemind's included, in the form the parent reads.
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    code = 0
    try:
        asyncio.run(_run(send))
    except Exception as error:  # noqa: BLE001 - the last line of defence; it is logged and the process ends
        logger.error("the DHT process ends: %s: %s", type(error).__name__, str(error) or "no details")
        code = 1
    if code and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # The daemon may still run.
    return code


if __name__ == "__main__":
    sys.exit(main())
