"""Makes the checks of one node, in the order in which it would come to them, and leaves out those that cannot be made.

Machine and store need nobody else. Then peers are greeted without a credential; the node's own port is opened, where
the run has an authority the node is admitted, and a peer calls it back, exchanges some payloads, and tells what it
trains. All of it takes some ten seconds, 20 more where something takes connections and says nothing, and up to a minute
more where the port was called back, in vain, a moment before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from genesis import __version__
from genesis.doctor import Checkup, Finding
from genesis.doctor.findings import problem_of
from genesis.doctor.machine import (
    disk_speed_finding,
    open_files_finding,
    packages_finding,
    python_finding,
    space_findings,
)
from genesis.doctor.store import StoreSeen, check_store
from loader import LoaderError
from trainer.collective import Terms
from trainer.collective.messages import INIT_DIGEST
from trainer.errors import DiscoveryError, RpcError, TrainerError, TrainerUsageError
from trainer.inner.machine import choose_device
from trainer.model import ModelConfig, available_memory_bytes, rows_for
from trainer.model.config import stage_names
from trainer.network.discovery import Announcement, open_discovery
from trainer.network.reachability import DialBackReply, measure_bandwidth, register_probe
from trainer.network.relay import RelayedReach
from trainer.network.rpc import Endpoint, Identity, Peer
from trainer.network.rpc.config import has_port, split_address
from trainer.network.rpc.endpoint import SPARE_DESCRIPTORS, reachable_host
from trainer.run.config import RunConfig
from trainer.run.doctor import link, machine, membership, peers, port, relays
from trainer.run.doctor import store as run_store
from trainer.run.doctor.peers import Greeting, Silence
from trainer.run.doctor.port import Place
from trainer.run.doctor.relays import Tried
from trainer.run.doctor.subject import AUTO_STAGE, Share, Subject
from trainer.run.node.admission import AdmissionClient, admission_client, reach_of
from trainer.run.node.identity import terms_of
from trainer.run.node.relaying import announced_relays, named_relays
from trainer.run.node.resolving import resolve
from trainer.run.swarm.shape import DRIVER, SwarmShape, shape_of

ERRORS: Final = (TrainerError, LoaderError)
_LEAST_FILES: Final = 256
_MODULES: Final = {"torch": "torch", "grpc": "grpcio", "blake3": "blake3", "safetensors": "safetensors"}
_DHT_MODULES: Final = {"hivemind": "hivemind"}
_MOST_GREETED: Final = 8
_MOST_ASKED: Final = 3
_DHT_S: Final = 40.0
_SETTLE_S: Final = 2.0
_RELAY_WAIT_S: Final = 15.0
_LOOK_S: Final = 0.2
_CALLED_AGAIN_S: Final = 75.0
"""How long peers are asked that call a silent port back only so often: after 10, 30, then 60 s (`Dialing`)."""
_ASKS_AGAIN_S: Final = 11.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the node would train, as far as that is known."""

    config: RunConfig
    """With nothing left to decide."""
    share: Share
    seen: StoreSeen | None
    swarm: SwarmShape | None = None

    def terms_beside(self, theirs: Terms, role: str) -> Terms | None:
        """Returns what this node would have to compare with a peer's terms; None: not known."""
        if self.swarm is not None:
            stage = theirs.architecture.get("stage")
            is_known = stage == DRIVER or stage in self.swarm.plan.names
            return self.swarm.terms(str(stage) if is_known else self.share.stage or role)
        vocabulary = None if self.seen is None else self.seen.vocabulary
        if vocabulary is None:
            return None
        config, shape, digest = self.config, self.share.model, theirs.synchronisation.get(INIT_DIGEST)
        if isinstance(digest, str) and not config.model.init_digest:
            if config.model.init_from:  # Its digest is found at the start, by reading all of the folder.
                return None
            config = replace(config, model=replace(config.model, init_digest=digest))
            shape = ModelConfig.from_dict({**theirs.architecture, "vocab_size": shape.vocab_size})
        return terms_of(config, shape, vocabulary)


def examine(subject: Subject, checkup: Checkup, *, has_run_option: bool) -> None:
    """Makes all checks of a node; what is found, ``checkup`` has."""
    config = subject.config
    modules = _MODULES | (_DHT_MODULES if config.discovery.uses_dht else {})
    checkup.add(python_finding())
    checkup.add(packages_finding(modules, __version__))
    checkup.add(machine.device_finding(config.device))
    checkup.add(open_files_finding(config.rpc.max_connections + SPARE_DESCRIPTORS, _LEAST_FILES))
    checkup.add(machine.shared_memory_finding())
    checkup.add(membership.run_file_finding(subject.fetched, is_given=has_run_option))
    seen = _look_at_store(subject, checkup)
    model = _model_of(subject, checkup, seen)
    _look_at_room(subject, checkup, model)
    try:
        identity = subject.identity()
    except TrainerUsageError as error:
        cure = "make the folder writable (--set state_dir=FOLDER), or restore the key file"
        checkup.add(Finding.failed("machine", "key", problem_of(error), cure))
        return
    if not config.discovery.initial_peers and not config.rpc.port and not config.admission.is_required:
        checkup.add(Finding.skipped("network", "peers", "neither --initial-peers nor --port: nobody else is asked"))
        return
    asyncio.run(_Network(subject, checkup, model, identity).look())


# -- store, model, room ------------------------------------------------------------------------------------------------


def _look_at_store(subject: Subject, checkup: Checkup) -> StoreSeen | None:
    config = subject.config
    if subject.role == "worker" and config.swarm.vocab_rows:
        checkup.add(Finding.skipped("store", "store", "a worker of a run that gives swarm.vocab_rows reads no store"))
        return None
    seen = check_store(checkup, config.data.store, config.data.public_key, clock=subject.clock)
    for mirror in config.data.mirrors:
        if seen is None:
            seen = check_store(checkup, mirror, config.data.public_key, clock=subject.clock)
    if seen is None:
        return None
    checkup.add(run_store.shards_finding(config, seen))
    checkup.add(run_store.model_rows_finding(seen, config))
    if subject.role == "node" and subject.is_named:
        checkup.add(run_store.checkpoint_finding(config))
    return seen


def _model_of(subject: Subject, checkup: Checkup, seen: StoreSeen | None) -> Model:
    config = subject.config
    try:
        if subject.role in ("worker", "driver") and (seen is not None or config.swarm.vocab_rows):
            swarm = shape_of(config)
            stage = "" if subject.stage in ("", AUTO_STAGE) else subject.stage
            if stage:
                swarm.plan.index(stage)
            return Model(config=config, share=Share(swarm.model, swarm.plan, stage), seen=seen, swarm=swarm)
        if seen is not None and seen.vocabulary is not None:
            device_type = choose_device(config.device).type
            resolved, shape = resolve(
                config,
                None,
                rows_for(seen.vocabulary.next_merge_id),
                lambda: config.model.memory_bytes or available_memory_bytes(device_type),
                shared_memory=device_type == "cpu",
            )
            return Model(config=resolved, share=Share(shape), seen=seen)
    except (TrainerUsageError, LoaderError) as error:
        cure = "correct these options, or give the run's file (--run)"
        checkup.add(Finding.failed("run", "model", problem_of(error), cure))
    return Model(config=config, share=machine.unknown_share(config), seen=seen)


def _look_at_room(subject: Subject, checkup: Checkup, model: Model) -> None:
    config = model.config
    if subject.role == "driver":
        checkup.add(Finding.skipped("machine", "memory", "a driver holds no parameters"))
    else:
        try:
            checkup.add(machine.memory_finding(config, model.share, choose_device(config.device).type))
        except TrainerUsageError:  # `device` says it.
            checkup.add(Finding.skipped("machine", "memory", "the device is not there"))
    manifest = None if model.seen is None else model.seen.manifest
    needs = machine.disk_needs(config, model.share, manifest)
    left_out = {"driver": {"checkpoints", "states"}, "worker": {"shards"}}.get(subject.role, set())
    needs = [each for each in needs if each[0] not in left_out]
    checkup.take("machine", "disk-space", lambda: space_findings(needs), "name folders that there can be")
    folders: dict[int, tuple[str, Path]] = {}
    for name, folder, *_ in needs:
        folders.setdefault(_device_of(folder), (name, folder))
    for name, folder in folders.values():
        checkup.add(disk_speed_finding(folder, name))


def _device_of(folder: Path) -> int:
    from genesis.doctor.machine import existing_folder

    return existing_folder(folder).stat().st_dev


# -- the others --------------------------------------------------------------------------------------------------------


class _Network:
    """The checks for which others are asked; in one event loop."""

    def __init__(self, subject: Subject, checkup: Checkup, model: Model, identity: Identity) -> None:
        self._subject = subject
        self._config = subject.config
        self._checkup = checkup
        self._model = model
        self._identity = identity
        self._greetings: list[Greeting] = []
        self._nodes: Sequence[Announcement] = ()  # That the DHT knows.
        self._reach = RelayedReach(subject.config.relay)
        self._tried: tuple[Tried, ...] = ()  # Relays that were asked for a port.

    async def look(self) -> None:
        """Makes them."""
        await self._greet()
        taken: TrainerUsageError | None = None
        client = self._client()
        async with self._endpoint(client) as (endpoint, failure):
            taken = failure
            if client is not None and not await self._is_admitted(client, endpoint):
                why = "the others answer members only"
                self._checkup.add(Finding.skipped("network", check, why) for check in ("reachable", "bandwidth"))
                self._checkup.add(Finding.skipped("run", "terms", why))
                return
            if self._config.discovery.uses_dht:
                await self._find_by_dht(endpoint)
            await self._look_at_port(endpoint, taken)
            await self._look_at_link(endpoint)
            if self._greetings:
                asked = [each.peer for each in self._greetings[:_MOST_ASKED]]
                role = self._subject.role
                finding = await peers.terms_finding(
                    endpoint, asked, lambda theirs: self._model.terms_beside(theirs, role)
                )
                self._checkup.add(finding)

    async def _greet(self) -> None:
        """Says hello at the addresses that were given; at those of seeds only looks whether somebody listens."""
        config, checkup = self._config, self._checkup
        addresses = config.discovery.initial_peers
        if not addresses:
            checkup.add(Finding.skipped("network", "peers", "no --initial-peers: this node begins the run"))
            return
        if config.discovery.uses_dht:
            causes = await asyncio.gather(*(peers.connect_cause(peers.seed_address(each)) for each in addresses))
            found: Sequence[Greeting | Silence] = [
                Silence(address, cause, f"the seed cannot be connected to ({cause})")
                for address, cause in zip(addresses, causes, strict=True)
                if cause != "tls"
            ]
            if len(found) == len(addresses):
                checkup.add(peers.peers_findings(found))
            else:
                checkup.add(
                    Finding.warning("network", "seeds", each.problem, each.cure)
                    for each in found
                    if isinstance(each, Silence)
                )
            return
        scout = Endpoint(self._identity, config.run_id, replace(config.rpc, port=0))
        try:
            asked = [peers.greet(scout, Peer(None, each), self._subject.clock) for each in addresses[:_MOST_GREETED]]
            found = await asyncio.gather(*asked)
        finally:
            await scout.stop()
        self._took(found)

    def _took(self, found: Sequence[Greeting | Silence]) -> None:
        """Says who has answered, by which clock and in which release."""
        own = self._identity.peer_id
        self._greetings = [each for each in found if isinstance(each, Greeting) and each.peer.peer_id != own]
        self._checkup.add(peers.peers_findings(found))
        self._checkup.add(peers.clock_findings(found, self._config.rpc.max_clock_skew_s))
        if self._greetings:
            self._checkup.add(peers.version_finding(self._greetings))

    def _client(self) -> AdmissionClient | None:
        config = self._config
        if not config.admission.is_required:
            return None
        self._checkup.add(membership.authority_clock_finding(config.admission, self._subject.clock))
        if not self._subject.is_named:
            why = "give --node-id: an invitation is spent by the key of the node that joins by it"
            self._checkup.add(Finding.skipped("run", "admission", why))
            return None
        hurried = replace(config, admission=membership.hurried(config.admission))
        return admission_client(hurried, self._identity, self._subject.role, self._subject.stage)

    @asynccontextmanager
    async def _endpoint(
        self, client: AdmissionClient | None
    ) -> AsyncIterator[tuple[Endpoint, TrainerUsageError | None]]:
        """Gives an endpoint that listens as the node would; with the reason, at another port where it cannot."""
        config, taken = self._config, None
        endpoint = self._made(config, client)
        try:
            await endpoint.start()
        except TrainerUsageError as error:
            taken = error
            public = config.rpc.public_address
            announced = public if has_port(public) else f"{public or reachable_host(config.rpc.host)}:{config.rpc.port}"
            endpoint = self._made(replace(config, rpc=replace(config.rpc, port=0, public_address=announced)), client)
            await endpoint.start()
        try:
            yield endpoint, taken
        finally:
            await endpoint.stop()

    def _made(self, config: RunConfig, client: AdmissionClient | None) -> Endpoint:
        # A node that relays for others may run already, and have the port of that.
        wait_s = min(_RELAY_WAIT_S, config.relay.wait_s)
        options = replace(config, relay=replace(config.relay, serve=False, port=0, wait_s=wait_s))
        self._reach = reach_of(options, client)
        admission = None if client is None else client.admission
        endpoint = Endpoint(self._identity, config.run_id, config.rpc, admission, self._reach)
        if client is None:
            register_probe(endpoint)
        else:
            client.register(endpoint)
        return endpoint

    async def _is_admitted(self, client: AdmissionClient, endpoint: Endpoint) -> bool:
        finding = await membership.join(client, endpoint, self._subject.clock, self._joins_by_relay)
        self._checkup.add(finding)
        return finding.status == "ok"

    async def _joins_by_relay(self) -> str:
        """Looks for a relay where the run's authority does not reach this node; returns its address there."""
        if self._config.relay.through:
            return ""
        self._tried = await relays.try_relays(self._reach, named_relays(self._config.discovery))
        self._checkup.add(relays.relay_finding(self._tried))
        return self._reach.address

    async def _find_by_dht(self, endpoint: Endpoint) -> None:
        if self._checkup.has_failed("peers"):
            return
        config = self._config
        options = replace(config.discovery, dht_port=0, dht_client_mode=True)
        stages = stage_names(config.swarm.num_stages) if self._model.swarm is not None else ()
        discovery = open_discovery(endpoint, options, stages)
        try:
            await discovery.start()
            ends_s, is_settling = time.monotonic() + _DHT_S, False
            while time.monotonic() < ends_s:
                await asyncio.sleep(_LOOK_S)
                if not is_settling and await discovery.peers():
                    ends_s, is_settling = time.monotonic() + _SETTLE_S, True
            self._nodes = await discovery.peers()
            nodes = self._nodes[:_MOST_GREETED]
            why = discovery.no_peers_reason()
        except DiscoveryError as error:
            nodes, why = (), problem_of(error)
        finally:
            await discovery.close()
        if not nodes:
            cure = "check --run-id; nothing is wrong if this is the first node of the run, or others are starting"
            self._checkup.add(
                Finding.warning("network", "peers", f"expected nodes of the run, found none: {why}", cure)
            )
            return
        self._took(await asyncio.gather(*(peers.greet(endpoint, it.peer(), self._subject.clock) for it in nodes)))

    # -- port and link -------------------------------------------------------------------------------------------------

    async def _look_at_port(self, endpoint: Endpoint, taken: TrainerUsageError | None) -> None:
        subject, checkup = self._subject, self._checkup
        if not subject.has_port:
            checkup.add(Finding.skipped("network", "reachable", f"a {subject.role} calls and need not be called"))
            return
        if self._config.relay.through:
            checkup.add(relays.named_findings(self._reach.states()))
            return
        if self._tried:  # The run's authority does not reach it, or did by a relay only.
            why = "others do not reach this node directly; see relay"
            checkup.add(Finding.skipped("network", "reachable", why))
            return
        able = [each for each in self._greetings if each.version]
        rpc = self._config.rpc
        others = [each.peer.address for each in able] + list(self._config.discovery.initial_peers)
        first = peers.seed_address(others[0]) if others and others[0].startswith("/") else "".join(others[:1])
        place = port.place_of(
            endpoint.address,
            rpc,
            reachable_host(rpc.host),
            rpc.port if taken is not None else endpoint.port,
            able[0] if able else None,
            split_address(first)[0] if first else "",
        )
        address = port.address_finding(place)
        if not able:
            checkup.add(address)
            if taken is not None:
                checkup.add(port.taken_finding(place.port, taken))
            checkup.add(Finding.skipped("network", "reachable", "no peer is there to call this node back"))
            return
        called = await self._called_back(endpoint, able[:_MOST_ASKED], place)
        if isinstance(called, tuple):
            greeting, reply = called
            reached = port.reached_finding(place, reply, greeting.name, taken="" if taken is None else str(taken))
            if reply.outcome == "reached" or taken is not None:
                checkup.add((address, reached))
                return
            self._tried = await self._try_relays(endpoint)
            checkup.add(relays.with_relay(each, self._tried) for each in (address, reached))
            checkup.add(relays.relay_finding(self._tried))
            return
        checkup.add(address)
        if taken is not None:
            checkup.add(port.taken_finding(place.port, taken))
        checkup.add(port.not_dialled_finding(called))

    async def _try_relays(self, endpoint: Endpoint) -> tuple[Tried, ...]:
        """Asks the relays of this run that can be seen for a port, one of which stays in use."""
        is_dht = self._config.discovery.uses_dht
        found = announced_relays(self._nodes) if is_dht else await relays.announced(endpoint, self._config)
        return await relays.try_relays(self._reach, (*named_relays(self._config.discovery), *found))

    async def _called_back(
        self, endpoint: Endpoint, able: Sequence[Greeting], place: Place
    ) -> tuple[Greeting, DialBackReply] | RpcError | TrainerUsageError:
        """Returns what the first peer has found that calls back, or why none does.

        Whoever has just mended what the doctor named runs it again at once, and peers still spare the port that was
        silent then: so they are asked again for a while.
        """
        ends_s = time.monotonic() + _CALLED_AGAIN_S
        while True:
            errors: list[RpcError | TrainerUsageError] = []
            for greeting in able:
                try:
                    return greeting, await port.dial_back(endpoint, greeting.peer, place)
                except (RpcError, TrainerUsageError) as error:
                    errors.append(error)
            if not any(port.is_too_soon(each) for each in errors) or time.monotonic() + _ASKS_AGAIN_S > ends_s:
                return errors[-1]
            logger.warning(
                "the peers do not call port %d back yet, since it was tried a moment ago; asking again in %.0f s",
                place.port,
                _ASKS_AGAIN_S,
            )
            await asyncio.sleep(_ASKS_AGAIN_S)

    async def _look_at_link(self, endpoint: Endpoint) -> None:
        able = [each for each in self._greetings if each.version]
        if not able:
            self._checkup.add(Finding.skipped("network", "bandwidth", "no peer is there to measure against"))
            return
        try:
            found = await measure_bandwidth(endpoint, able[0].peer)
        except (RpcError, TrainerUsageError) as error:
            self._checkup.add(Finding.skipped("network", "bandwidth", problem_of(error)))
            return
        model, config = self._model, self._model.config
        finding = link.bandwidth_finding(found, able[0].name, config.rpc.stall_timeout_s)
        self._checkup.add(finding)
        if self._subject.role == "driver":
            return
        num_members = 1 + max(1, len(self._greetings))
        moved = link.round_bytes(config, model.share, num_members)
        self._checkup.add(link.round_finding(config, moved, found, num_members))
