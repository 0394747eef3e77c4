"""A node's side of admission: joins by the run's authority, keeps the credential fresh, hears and spreads revocations.

    stored credential → endpoint answers → join (the authority dials back) → renewed at half its life, in the background
    every 20 s: the authority is asked for the list of revoked peers · every 15 s: two peers are · news: four are told

A node with a valid stored credential starts, and goes on, while no authority answers; one warning says how long it can.
News of a revocation reaches nodes that have no way to the authority through those that do: told at once to four peers,
who tell four others, and asked for by all others within 15 s. The cost, measured by `bench_swarm.py credentials`, is a
quarter of a kB/s.

A node that learns that it was revoked ends with one line: the others refuse it anyway.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import random
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Final, TypeVar

import httpx
import tenacity
from pydantic import BaseModel, Field, ValidationError

from genesis import __version__
from genesis.store.durable import TemporaryFile
from genesis.store.limits import RetryPolicy
from trainer.errors import AdmissionError, PeerUnavailableError, RefusedError, RpcError, TrainerUsageError
from trainer.network.discovery import Announcement
from trainer.network.rpc import Endpoint, Identity, Message, Peer, Reply, Request
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import MAX_LIST_BYTES, Credential, PeerKey, RevokedPeers, Role
from trainer.network.rpc.dialing import is_private_host
from trainer.network.rpc.messages import Reason
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.run.authority.messages import (
    CHECK_PATH,
    INFO_PATH,
    JOIN_PATH,
    PROBE_METHOD,
    AuthorityInfo,
    CheckIn,
    CheckInReply,
    JoinReply,
    JoinRequest,
    Probe,
    ProbeReply,
    Refusal,
    invitation_key,
    package_digest,
    sign_check_in,
    sign_join,
)
from trainer.run.config import RunConfig
from trainer.run.config.admission import AdmissionConfig

logger = logging.getLogger(__name__)

REVOKED_METHOD: Final = "admission/revoked"
RENEW_AT: Final = 0.5
"""Share of a credential's life after which it is renewed."""
_GOSSIP_INTERVAL_S: Final = 15.0
_ASKED, _TOLD = 2, 4  # Peers that are asked for news every interval; that are told of it at once.
_QUESTIONS, _QUESTIONS_PER_S = 8.0, 0.5  # Of one peer that are answered.
_TIMEOUT_S: Final = 10.0
_JOIN_TIMEOUT_S: Final = 30.0  # The authority dials back meanwhile.
_MAX_REPLY_BYTES: Final = MAX_LIST_BYTES + (64 << 10)
_RENEWAL: Final = RetryPolicy(first_wait_s=1.0, longest_wait_s=60.0)
_JOINING: Final = RetryPolicy(first_wait_s=0.5, longest_wait_s=10.0)
_TEMPORARY: Final = frozenset({Reason.BUSY, Reason.RATE, Reason.INTERNAL, "unreachable"})
"""Refusals that may pass by themselves: ``unreachable`` too, since a port may be opened meanwhile."""

ReplyT = TypeVar("ReplyT", bound=BaseModel)
Peers = Callable[[], Awaitable[Sequence[Announcement]]]


class RevokedNumbers(Message):
    """The number of the newest list of revoked peers that a node has of each authority; a list may be the payload."""

    numbers: Annotated[dict[PeerKey, Annotated[int, Field(ge=0, lt=2**53)]], Field(max_length=16)]


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
        self._answers = TokenBuckets(_QUESTIONS, _QUESTIONS_PER_S)
        self._has_news = asyncio.Event()
        self._is_away = False  # Whether no authority answered last.
        self._tasks: list[asyncio.Task[None]] = []

    def register(self, endpoint: Endpoint) -> None:
        """Lets an endpoint answer the authority that dials back, and peers that ask for or tell of revocations."""

        async def answer_probe(request: Request[Probe]) -> Reply[ProbeReply]:
            return Reply(ProbeReply(challenge=request.body.challenge))

        endpoint.register(PROBE_METHOD, Probe, answer_probe)
        endpoint.register(REVOKED_METHOD, RevokedNumbers, self._answer_news, max_payload_bytes=MAX_LIST_BYTES)

    async def join(self, address: str, stop: Callable[[], bool] = lambda: False) -> Credential:
        """Gets a credential for this node, whose endpoint answers at ``address``; returns it.

        Where no authority answers for `join_timeout_s`, a stored credential that is still valid has to do.

        Raises:
            TrainerUsageError: the authority refuses this node, which trying again does not change.
            AdmissionError: no authority answers, and there is no valid credential.
        """
        self._take_stored()
        timeout_s = self._config.join_timeout_s if self.admission.own is None else 0.0
        try:
            return await self._joined(address, _JOINING, timeout_s, stop)
        except RefusedError as error:
            raise TrainerUsageError(f"the run's authority refuses this node ({error.reason}): {error}") from None
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

    def start(self, address: Callable[[], str], peers: Peers, endpoint: Endpoint) -> None:
        """Begins to renew and to listen for revocations, beside everything else; returns at once."""
        self._tasks = [
            asyncio.create_task(self._renew_forever(address), name="admission-renewal"),
            asyncio.create_task(self._check_forever(), name="admission-check"),
            asyncio.create_task(self._spread_forever(peers, endpoint), name="admission-news"),
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
            if not url.startswith("https:") and not is_private_host(httpx.URL(url).host):
                raise TrainerUsageError(
                    f"admission.authorities: expected the key of the authority at {url}, since anybody on the way "
                    "could answer for it; give --set admission.authorities=[KEY] (it prints its key), or https"
                )
            reply = await self._ask("GET", url, INFO_PATH, b"", AuthorityInfo, _TIMEOUT_S)
            if reply.run_name != self.admission.run_name:
                raise TrainerUsageError(
                    f"--authority {url}: expected run {self.admission.run_name!r}, found {reply.run_name!r}"
                )
            found.append(reply.issuer)
        logger.info("credentials count that %s has signed", ", ".join(found))
        self.admission.authorities = frozenset(found)

    async def _joined(
        self, address: str, policy: RetryPolicy, timeout_s: float, stop: Callable[[], bool] = lambda: False
    ) -> Credential:
        """Asks the authorities in turn until one answers, for ``timeout_s``; raises its refusal, or the last error."""

        def is_temporary(error: BaseException) -> bool:
            passes = isinstance(error, RefusedError) and error.reason in _TEMPORARY
            return (isinstance(error, PeerUnavailableError) or passes) and not stop()

        controller = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_temporary),
            wait=tenacity.wait_random_exponential(multiplier=policy.first_wait_s, max=policy.longest_wait_s),
            stop=tenacity.stop_after_delay(timeout_s),
            reraise=True,
        )
        async for attempt in controller:
            with attempt:
                return await self._join_once(address)
        raise AdmissionError("expected an answer of the run's authority, found none")

    async def _join_once(self, address: str) -> Credential:
        await self._learn_authorities()
        reply = await self._ask_any(JOIN_PATH, lambda: self._join_request(address), JoinReply, _JOIN_TIMEOUT_S)
        if reply.credential.peer_id != self._identity.peer_id:
            raise PeerUnavailableError("the run's authority answered with the credential of another node")
        try:
            self.admission.take_own(reply.credential)
        except RefusedError as error:
            raise PeerUnavailableError(
                f"the run's authority answered with a credential that is not valid: {error}"
            ) from None
        self._hear(reply.revoked)
        if reply.credential.stage is not None:
            self.stage = reply.credential.stage
        self._store()
        return reply.credential

    def _join_request(self, address: str) -> bytes:
        request = JoinRequest(
            run_name=self.admission.run_name,
            peer_id=self._identity.peer_id,
            role=self._role,
            stage=self.stage,  # type: ignore[arg-type]
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
            left_s = max(1.0, own.expires_at - self._clock()) if own is not None else self._config.join_timeout_s
            try:
                await self._joined(address(), _RENEWAL, left_s)
            except RefusedError as error:
                if error.reason == Reason.REVOKED:
                    self._fail(f"the run's authority has revoked this node ({self._identity.peer_id})")
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

    def _fail(self, text: str) -> None:
        if self.failure is None:
            logger.error("%s; it ends", text)
            self.failure = AdmissionError(f"{text}; ask whoever runs this run")

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
            if stored.credential.peer_id == self._identity.peer_id and stored.credential.role == self._role:
                self.admission.take_own(stored.credential)
        except FileNotFoundError:
            return
        except (OSError, ValidationError, RefusedError) as error:
            logger.info("%s: the credential of before is not used: %s", self._path, str(error).partition("\n")[0])

    def _store(self) -> None:
        if self.admission.own is None:
            return
        stored = _Stored(credential=self.admission.own, revoked=self.admission.lists())
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
                reply = await self._ask_any(CHECK_PATH, self._check_request, CheckInReply, _TIMEOUT_S)
            except PeerUnavailableError as error:
                self._note_away(error)
                continue
            except RefusedError as error:
                if error.reason == Reason.REVOKED:
                    self._fail(f"the run's authority has revoked this node ({self._identity.peer_id})")
                else:
                    logger.warning("the run's authority refuses a check-in (%s): %s", error.reason, error)
                continue
            if self._is_away:
                self._is_away = False
                logger.info("the run's authority answers again")
            self._hear(reply.revoked)

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
            stage="" if self.stage == "auto" else self.stage,  # type: ignore[arg-type]
            known=self.admission.numbers(),
            sent_at=self._clock(),
        )
        return sign_check_in(request, self._identity)

    def _hear(self, news: RevokedPeers | None) -> None:
        """Takes a list up, and has it told to others where it is news."""
        if news is None:
            return
        try:
            is_news = self.admission.revoke(news)
        except RefusedError as error:
            logger.warning("a list of revoked peers is not believed: %s", error)
            return
        if is_news:
            self._store()
            self._has_news.set()
            if self.admission.is_revoked(self._identity.peer_id):
                self._fail(f"the run's authority has revoked this node ({self._identity.peer_id})")

    async def _answer_news(self, request: Request[RevokedNumbers]) -> Reply[RevokedNumbers]:
        if not self._answers.take(request.sender):
            raise RefusedError(Reason.BUSY, "expected fewer questions for revocations; ask again later")
        self._hear_wire(bytes(request.payload))
        newer = self.admission.newer_than(request.body.numbers)
        return Reply(RevokedNumbers(numbers=self.admission.numbers()), b"" if newer is None else newer.wire())

    def _hear_wire(self, wire: bytes) -> None:
        if wire:
            news = RevokedPeers.parse(wire)
            # Older ones cost no signature.
            if news.number > self.admission.numbers().get(news.issuer, 0):
                self._hear(news)

    async def _spread_forever(self, peers: Peers, endpoint: Endpoint) -> None:
        while True:
            try:
                async with asyncio.timeout(_GOSSIP_INTERVAL_S * self._rng.uniform(0.8, 1.0)):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            count = _TOLD if self._has_news.is_set() else _ASKED
            self._has_news.clear()
            known = [said.peer() for said in await peers()]
            chosen = self._rng.sample(known, min(count, len(known)))
            await asyncio.gather(*(self._exchange_news(endpoint, peer) for peer in chosen))

    async def _exchange_news(self, endpoint: Endpoint, peer: Peer) -> None:
        """Asks a peer for a newer list, and tells it of this node's if that is newer."""
        try:
            numbers = RevokedNumbers(numbers=self.admission.numbers())
            reply = await endpoint.call(peer, REVOKED_METHOD, numbers, RevokedNumbers, timeout_s=_TIMEOUT_S)
            self._hear_wire(bytes(reply.payload))
            newer = self.admission.newer_than(reply.body.numbers)
            if newer is not None:
                numbers = RevokedNumbers(numbers=self.admission.numbers())
                await endpoint.call(
                    peer, REVOKED_METHOD, numbers, RevokedNumbers, payload=newer.wire(), timeout_s=_TIMEOUT_S
                )
        except RpcError as error:
            logger.debug("no news of revocations exchanged with %s: %s", peer.address, error)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _ask_any(self, path: str, request: Callable[[], bytes], reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """Posts to the authorities in turn until one answers; a refusal that may pass has the next one asked too."""
        failure: RpcError = PeerUnavailableError("expected the address of an authority (--authority URL), found none")
        for url in self._config.urls:
            try:
                return await self._ask("POST", url, path, request(), reply, timeout_s)
            except PeerUnavailableError as error:
                failure = error
            except RefusedError as error:
                if error.reason not in _TEMPORARY:
                    raise
                failure = error
        raise failure

    async def _ask(
        self, method: str, url: str, path: str, body: bytes, reply: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        """Asks one authority; raises RefusedError, or PeerUnavailableError where it does not answer as one does."""
        who = f"the authority at {url}"
        try:
            async with (
                httpx.AsyncClient(timeout=timeout_s, follow_redirects=False, verify=_tls()) as client,
                asyncio.timeout(timeout_s),
            ):
                headers = {"content-type": "application/json"}
                async with client.stream(method, url.rstrip("/") + path, content=body, headers=headers) as response:
                    answer = bytearray()
                    async for chunk in response.aiter_bytes():
                        answer += chunk
                        if len(answer) > _MAX_REPLY_BYTES:
                            raise PeerUnavailableError(f"{who} answered with more than {_MAX_REPLY_BYTES} bytes")
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise PeerUnavailableError(f"{who} does not answer ({reason})") from None
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(bytes(answer))
            refusal = Refusal.model_validate_json(bytes(answer))
        except ValidationError:
            raise PeerUnavailableError(f"{who} answered as none does (HTTP {response.status_code})") from None
        raise RefusedError(refusal.reason, refusal.text)


def admission_path(config: RunConfig) -> Path:
    """Returns the file of a node's credential."""
    return Path(config.state_dir).expanduser() / "admission" / config.run_id / f"{config.node_id}.json"


def admission_client(config: RunConfig, identity: Identity, role: Role, stage: str = "") -> AdmissionClient | None:
    """Returns what gets a node admitted; None for a run without an authority."""
    if not config.admission.is_required:
        return None
    return AdmissionClient(config.admission, identity, config.run_id, role, admission_path(config), stage=stage)


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates of all authorities of the web takes 20 ms."""
    return httpx.create_ssl_context()


def _memory_bytes() -> int:
    from trainer.model import available_memory_bytes

    return available_memory_bytes("cpu")
