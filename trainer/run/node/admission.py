"""A node's side of admission: it joins by the run's authority, keeps its credential fresh, and hears of revocations.

    stored credential → endpoint answers → join (the authority dials back) → renewed at half its life, in the background
    every 20 s: the authority is told that this node is there, and asked for the list of revoked peers

A node with a valid stored credential starts, and goes on, while no authority answers; one warning says how long it can.
A node that learns by a signed list that it was revoked ends with one line: the others refuse it anyway.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import tenacity
from pydantic import Field, ValidationError

from genesis import __version__
from genesis.store.durable import TemporaryFile
from genesis.store.limits import RetryPolicy
from trainer.errors import AdmissionError, AdmissionRefusedError, PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.discovery.base import Discovery
from trainer.network.reachability import register_probe
from trainer.network.relay import RelayedReach
from trainer.network.rpc import Endpoint, Identity, Message
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import Credential, RelayPass, RevokedPeers, Role
from trainer.network.rpc.dialing import is_private_host
from trainer.run.authority.messages import (
    ADDRESSES_PATH,
    CHECK_PATH,
    INFO_PATH,
    JOIN_PATH,
    RELAY_PATH,
    AddressReply,
    AddressRequest,
    AuthorityInfo,
    CheckIn,
    CheckInReply,
    JoinReply,
    JoinRequest,
    RelayPassReply,
    WantedAddress,
    invitation_key,
    package_digest,
    sign_address_request,
    sign_check_in,
    sign_join,
)
from trainer.run.config import RunConfig
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node.authority_client import TEMPORARY, AuthorityClient
from trainer.run.node.relaying import address_by_relay
from trainer.run.node.revocation_news import RevocationNews
from trainer.run.signed import SignedRun

logger = logging.getLogger(__name__)

RENEW_AT: Final = 0.5
"""Share of a credential's life after which it is renewed."""
_TIMEOUT_S: Final = 10.0
_JOIN_TIMEOUT_S: Final = 30.0  # The authority dials back meanwhile.
_PASS_LEFT_S: Final = 60.0  # Of a relay pass, which joining by it takes.
_RENEWAL: Final = RetryPolicy(first_wait_s=1.0, longest_wait_s=60.0)
_JOINING: Final = RetryPolicy(first_wait_s=0.5, longest_wait_s=10.0)


class _Stored(Message):
    """What is kept between two lives of a process; nothing of it is secret."""

    credential: Credential
    revoked: Annotated[tuple[RevokedPeers, ...], Field(max_length=16)] = ()


class AdmissionClient:
    """Gets one node admitted and keeps it so; `admission` is for its endpoints. For one event loop.

    ``stage`` is the one that a worker holds or wants, ``auto`` the authority's choice; ``path`` is where the credential
    is kept.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        identity: Identity,
        run_name: str,
        role: Role,
        path: Path,
        *,
        stage: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.admission = Admission(run_name, config.authorities, clock)
        self.failure: AdmissionError | None = None  # Why this node is out of the run, once it is.
        self.stage = stage
        self._config = config
        self._identity = identity
        self._role: Role = role
        self._path = path
        self._clock = clock
        self._token = invitation_key(config.token) if config.token else None
        self._rng = random.Random(identity.peer_id)
        self._news = RevocationNews(self.admission, self._rng, self._on_news)
        self._authorities = AuthorityClient(config.urls, self._news.hear)
        self._is_away = False  # Whether no authority answered last.
        self._next: Credential | None = None  # For the stage that this worker is about to move to.
        self._tasks: list[asyncio.Task[None]] = []
        self._asking = asyncio.Lock()
        self._addresses_asked_at = 0.0
        self._relay_pass: RelayPass | None = None

    def go_by(self, authorities: frozenset[str]) -> None:
        """Takes up the keys that the run names now; a run whose file names none goes by those that are given."""
        if authorities:
            self.admission.authorities = authorities

    def register(self, endpoint: Endpoint) -> None:
        """Lets an endpoint answer the authority that dials back, and peers that ask for or tell of revocations."""
        register_probe(endpoint)
        self._news.register(endpoint)

    async def join(
        self,
        address: str,
        stop: Callable[[], bool] = lambda: False,
        elsewhere: Callable[[], Awaitable[str]] | None = None,
    ) -> Credential:
        """Gets a credential for this node, whose endpoint answers at ``address``; returns it.

        ``elsewhere`` is asked once for another address, if the authority does not reach the node at that one. Where no
        authority answers for `join_timeout_s`, a stored credential that is still valid has to do.

        Raises:
            TrainerUsageError: the authority refuses this node, which trying again does not change.
            AdmissionError: no authority answers, and there is no valid credential.
        """
        self._take_stored()
        if not self._config.urls and self.admission.own is None:
            raise TrainerUsageError(
                "--authority: expected the address of the run's authority, which admits its nodes, found none here or "
                "in the run's file (admission.urls)"
            )
        timeout_s = self._config.join_timeout_s if self.admission.own is None else 0.0
        try:
            return await self._joined(address, _JOINING, timeout_s, stop, elsewhere)
        except RefusedError as error:
            text = f"the run's authority refuses this node ({error.reason}): {error}"
            raise AdmissionRefusedError(error.reason, text) from None
        except PeerUnavailableError as error:
            if not self.admission.authorities:
                self._take_stored(trusts_issuer=True)
            own = self.admission.own
            if own is None:
                raise AdmissionError(f"{error}; check --authority, and that it runs") from None
            left_s = own.expires_at - self._clock()
            logger.warning(
                "%s; going on with the credential of before, which is valid for %.0f min", error, left_s / 60
            )
            return own

    async def prepare_move(self, address: str, stage: str) -> None:
        """Gets a worker's credential for another stage, which its next client for that stage takes up.

        Until then this one goes by its own. Raises RpcError: no authority answers, or it refuses.
        """
        self._next = (await self._asked_to_join(address, stage)).credential
        self._store()

    async def relay_pass(self) -> bytes:
        """Returns what relays are shown before this node has joined: its credential of before, or a pass to join by.

        Raises RpcError: no authority answers, or it refuses; TrainerUsageError as `join`.
        """
        self._take_stored()
        if self.admission.own is not None:
            return self.admission.own_wire
        known = self._relay_pass
        if known is None or known.expires_at < self._clock() + _PASS_LEFT_S:
            await self._learn_authorities()
            reply = await self._authorities.ask_any(
                RELAY_PATH, lambda: self._join_request("", self.stage), RelayPassReply, _TIMEOUT_S
            )
            known = self._relay_pass = reply.relay_pass
        return known.wire()

    async def addresses(self, wanted: tuple[WantedAddress, ...]) -> AddressReply:
        """Has addresses of the run's bucket signed; one request after the other, since each has a later time.

        Raises RpcError: no authority answers, or it refuses.
        """

        def request() -> bytes:
            self._addresses_asked_at = max(self._clock(), self._addresses_asked_at + 1e-3)
            content = AddressRequest(
                run_name=self.admission.run_name,
                peer_id=self._identity.peer_id,
                wanted=wanted,
                sent_at=self._addresses_asked_at,
            )
            return sign_address_request(content, self._identity)

        async with self._asking:
            return await self._authorities.ask_any(ADDRESSES_PATH, request, AddressReply, _TIMEOUT_S)

    def start(self, address: Callable[[], str], discovery: Discovery | None, endpoint: Endpoint | None) -> None:
        """Begins to renew and to listen for revocations, beside everything else; returns at once.

        A node without an endpoint hears of revocations from the authority alone.
        """
        self._tasks = [
            asyncio.create_task(self._renew_forever(address), name="admission-renewal"),
            asyncio.create_task(self._check_forever(), name="admission-check"),
        ]
        if endpoint is not None and discovery is not None:
            self._tasks += [
                asyncio.create_task(self._news.spread_forever(discovery.peers, endpoint), name="admission-news"),
                asyncio.create_task(self._news.look_up_forever(discovery), name="admission-dht"),
            ]

    async def stop(self) -> None:
        """Ends what `start` began."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises AdmissionError once this node is out of the run; from any thread."""
        if self.failure is not None:
            raise self.failure

    async def failed(self) -> None:
        """Waits until this node is out of the run, and raises AdmissionError."""
        while True:
            self.check()
            await asyncio.sleep(1.0)

    # -- the credential ------------------------------------------------------------------------------------------------

    async def _learn_authorities(self) -> None:
        """Takes the keys of authorities given by address alone, where nobody on the way can answer for them."""
        if self.admission.authorities:
            return
        found = []
        for url in self._config.urls:
            if not url.startswith("https:") and not is_private_host(str(urlsplit(url).hostname)):
                raise TrainerUsageError(
                    f"admission.authorities: expected the key of the authority at {url}, since anybody on the way "
                    "could answer for it; give --set admission.authorities=[KEY] (it prints its key), or https"
                )
            reply = await self._authorities.ask(url, "GET", INFO_PATH, b"", AuthorityInfo, _TIMEOUT_S)
            if reply.run_name != self.admission.run_name:
                raise TrainerUsageError(
                    f"--authority {url}: expected run {self.admission.run_name!r}, found {reply.run_name!r}"
                )
            found.append(reply.issuer)
        logger.info("credentials count that %s has signed", ", ".join(found))
        self.admission.authorities = frozenset(found)

    async def _joined(
        self,
        address: str,
        policy: RetryPolicy,
        timeout_s: float,
        stop: Callable[[], bool] = lambda: False,
        elsewhere: Callable[[], Awaitable[str]] | None = None,
    ) -> Credential:
        """Asks the authorities in turn until one answers, for ``timeout_s``; raises its refusal, or the last error."""

        def is_temporary(error: BaseException) -> bool:
            passes = isinstance(error, RefusedError) and error.reason in TEMPORARY
            return (isinstance(error, PeerUnavailableError) or passes) and not stop()

        controller = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_temporary),
            wait=tenacity.wait_random_exponential(multiplier=policy.first_wait_s, max=policy.longest_wait_s),
            stop=tenacity.stop_after_delay(timeout_s),
            reraise=True,
        )
        async for attempt in controller:
            with attempt:
                try:
                    return await self._join_once(address)
                except RefusedError as error:
                    if error.reason != "unreachable" or elsewhere is None:
                        raise
                    look, elsewhere = elsewhere, None
                    found = await look()
                    if not found:
                        raise
                    address = found
                return await self._join_once(address)
        raise AdmissionError("expected an answer of the run's authority, found none")

    async def _join_once(self, address: str) -> Credential:
        await self._learn_authorities()
        reply = await self._asked_to_join(address, self.stage)
        self.admission.take_own(reply.credential)
        self._news.hear(reply.revoked)
        if reply.credential.stage is not None:
            self.stage = reply.credential.stage
        self._store()
        return reply.credential

    async def _asked_to_join(self, address: str, stage: str) -> JoinReply:
        """Asks the authorities once; returns an answer whose credential is this node's, and valid."""
        reply = await self._authorities.ask_any(
            JOIN_PATH, lambda: self._join_request(address, stage), JoinReply, _JOIN_TIMEOUT_S
        )
        credential = reply.credential
        if credential.peer_id != self._identity.peer_id:
            raise PeerUnavailableError("the run's authority answered with the credential of another node")
        try:
            credential.verify(self.admission.run_name, self.admission.authorities, self._clock(), ())
        except RefusedError as error:
            raise PeerUnavailableError(
                f"the run's authority answered with a credential that is not valid: {error}"
            ) from None
        return reply

    def _join_request(self, address: str, stage: str) -> bytes:
        request = JoinRequest(
            run_name=self.admission.run_name,
            peer_id=self._identity.peer_id,
            role=self._role,
            stage=stage,
            address=address,
            device=f"{platform.machine()} {platform.system()}"[:128],
            memory_bytes=_memory_bytes(),
            bandwidth_mbit=self._config.bandwidth_mbit,
            version=__version__,
            package_digest=package_digest(),
            token_key="" if self._token is None else self._token.peer_id,
            nonce=secrets.token_hex(16),
            sent_at=self._clock(),
        )
        return sign_join(request, self._identity, self._token)

    async def _renew_forever(self, address: Callable[[], str]) -> None:
        while self.failure is None:
            await asyncio.sleep(self._renewal_due_s())
            own = self.admission.own
            left_s = own.expires_at - self._clock() if own is not None else self._config.join_timeout_s
            try:
                await self._joined(address(), _RENEWAL, max(_RENEWAL.longest_wait_s, left_s))
            except RefusedError as error:
                if self._is_revoked:  # The signed list came with the refusal.
                    return
                logger.warning(
                    "the run's authority does not renew this node's credential (%s): %s", error.reason, error
                )
                await asyncio.sleep(_RENEWAL.longest_wait_s)
            except PeerUnavailableError as error:
                logger.error(
                    "%s; this node's credential has expired, and the others refuse it until it is renewed", error
                )

    def _renewal_due_s(self) -> float:
        """Returns the seconds until the credential is to be renewed, spread a little over the nodes."""
        own = self.admission.own
        if own is None:
            return 1.0
        life_s = own.expires_at - own.issued_at
        due_at = own.issued_at + life_s * RENEW_AT * self._rng.uniform(0.9, 1.0)
        return max(0.05, due_at - self._clock())

    def _take_stored(self, *, trusts_issuer: bool = False) -> None:
        """Takes up the credential of an earlier life, and the revocations known then, where they are still valid.

        With ``trusts_issuer`` whoever issued it is an authority: it was found to be one then.
        """
        try:
            stored = _Stored.model_validate_json(self._path.read_bytes())
            if trusts_issuer:
                self.admission.authorities = frozenset({stored.credential.issuer})
            elif not self.admission.authorities:
                return
            for known in stored.revoked:
                self.admission.revoke(known)
            credential = stored.credential
            is_own = credential.peer_id == self._identity.peer_id and credential.role == self._role
            if is_own and (self.stage in ("", "auto") or credential.stage in (None, self.stage)):
                self.admission.take_own(credential)
        except FileNotFoundError:
            return
        except (OSError, ValidationError, RefusedError) as error:
            logger.info("%s: the credential of before is not used: %s", self._path, str(error).partition("\n")[0])

    def _store(self) -> None:
        credential = self._next or self.admission.own
        if credential is None:
            return
        stored = _Stored(credential=credential, revoked=self.admission.lists())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(self._path.parent) as file:
                file.write(memoryview(stored.model_dump_json().encode()))
                file.replace(self._path)
        except OSError as error:
            logger.warning("%s: the credential cannot be kept for the next start: %s", self._path, error)

    # -- revocations ---------------------------------------------------------------------------------------------------

    async def _check_forever(self) -> None:
        while self.failure is None:
            await asyncio.sleep(self._config.check_interval_s * self._rng.uniform(0.8, 1.0))
            try:
                reply = await self._authorities.ask_any(CHECK_PATH, self._check_request, CheckInReply, _TIMEOUT_S)
            except PeerUnavailableError as error:
                self._note_away(error)
                continue
            except RefusedError as error:
                if not self._is_revoked:
                    logger.warning("the run's authority refuses a check-in (%s): %s", error.reason, error)
                continue
            if self._is_away:
                self._is_away = False
                logger.info("the run's authority answers again")
            self._news.hear(reply.revoked)

    def _note_away(self, error: PeerUnavailableError) -> None:
        own = self.admission.own
        if not self._is_away and own is not None:
            left_s = own.expires_at - self._clock()
            logger.warning("%s; going on, with a credential that is valid for %.0f min", error, left_s / 60)
        self._is_away = True

    def _check_request(self) -> bytes:
        request = CheckIn(
            run_name=self.admission.run_name,
            peer_id=self._identity.peer_id,
            stage="" if self.stage == "auto" else self.stage,
            known=self.admission.numbers(),
            sent_at=self._clock(),
        )
        return sign_check_in(request, self._identity)

    def _on_news(self) -> None:
        """Keeps a newer list for the next start, and ends this node where it is in it."""
        self._store()
        if self._is_revoked:
            self._fail_as_revoked()

    @property
    def _is_revoked(self) -> bool:
        return self.admission.is_revoked(self._identity.peer_id)

    def _fail_as_revoked(self) -> None:
        if self.failure is None:
            text = f"the run's authority has revoked this node ({self._identity.peer_id})"
            logger.error("%s; it ends", text)
            self.failure = AdmissionError(f"{text}; ask whoever runs this run")


def admission_path(config: RunConfig) -> Path:
    """Returns the file of a node's credential."""
    return Path(config.state_dir).expanduser() / "admission" / config.run_id / f"{config.node_id}.json"


def admission_client(config: RunConfig, identity: Identity, role: Role, stage: str = "") -> AdmissionClient | None:
    """Returns what gets a node admitted; None for a run without an authority."""
    if not config.admission.is_required:
        if config.admission.token:
            logger.warning("an invitation was given, but this run names no authority: anybody may join it")
        return None
    client = AdmissionClient(config.admission, identity, config.run_id, role, admission_path(config), stage=stage)
    run = None if role == "monitor" else SignedRun.open(config)  # A monitor keeps no run on the disk.
    if run is not None:
        client.go_by(run.authorities())  # A change may have named others since the run's file.
    return client


def reach_of(config: RunConfig, client: AdmissionClient | None) -> RelayedReach:
    """Returns how a node's endpoint is reached by way of relays, which a newcomer shows a pass of its authority."""
    return RelayedReach(config.relay, None if client is None else client.relay_pass)


async def join_reachably(
    client: AdmissionClient,
    endpoint: Endpoint,
    reach: RelayedReach,
    config: RunConfig,
    stop: Callable[[], bool] = lambda: False,
) -> Credential:
    """Joins and raises as `AdmissionClient.join`; by way of a relay where the authority does not reach the node."""

    async def by_relay() -> str:
        return await address_by_relay(config.relay, config.discovery, reach)

    return await client.join(endpoint.address, stop, by_relay)


def _memory_bytes() -> int:
    from trainer.model import available_memory_bytes

    return available_memory_bytes("cpu")
