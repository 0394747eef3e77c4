"""What an authority does with a request: the checks, from cheap to expensive, and the credential at the end.

    rate of the address (`take_request`) → size, form → run, clock → signatures → revoked? seen before?
    → invitation or allow-list → digest of files → dial-back → (one transaction) a use of the invitation, the stage
    → credential

A request that fails is refused with one word and one line. Nothing that is logged or told contains an invitation,
because none arrives here. A credential lives four hours and is renewed when half of that is over, so an authority may
be away for two hours without anybody stopping; a newcomer waits for it. Revocations do not wait for the end of a
credential: nodes ask for the list every 20 s and pass news on among themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from genesis.errors import GenesisError
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.reachability import DialBack
from trainer.network.rpc.credential import MAX_CLOCK_SKEW_S, Credential, RelayPass, RevokedPeers
from trainer.network.rpc.dialing import address_group
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Reason
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.run.authority.addresses import BucketAddresses
from trainer.run.authority.messages import (
    AddressReply,
    AuthorityInfo,
    BucketAddress,
    CheckInReply,
    JoinReply,
    JoinRequest,
    RelayPassReply,
    SignedAddressRequest,
    SignedCheckIn,
    SignedJoin,
    check_address_request_signature,
    check_check_in_signature,
    check_join_signatures,
    parse_request,
)
from trainer.run.authority.register import Register

logger = logging.getLogger(__name__)

LIFE_S: Final = 4 * 3600.0
RELAY_PASS_S: Final = 300.0
"""Life of a relay pass: a node joins in it, and then shows relays its credential."""
_REFUSALS_LOGGED, _REFUSALS_LOGGED_PER_S = 20.0, 0.2
_PASSES, _PASSES_PER_S = 16.0, 0.1
"""By one invitation, or of one member: an invitation that is not used up is good for any number of keys."""
_UNREACHED_OK: Final = frozenset({"driver", "monitor"})
"""Roles of nodes that call and need not be called: their key has signed the request, which proves it."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorityConfig:
    """Whom an authority admits, and for how long."""

    stages: tuple[str, ...] = ()
    """Of the run, in order; empty: workers choose their stage themselves."""
    life_s: float = LIFE_S
    """Seconds for which a credential is valid."""
    package_digests: tuple[str, ...] = ()
    """Digests of installed files that are admitted; empty: any."""
    outbound_only: bool = False
    """Admit nodes that name no address: those of a run whose rounds go through a bucket need none."""
    allow_private: bool = False
    """Dial private addresses for requesters from anywhere."""
    tls: bool = True
    """As the nodes of the run have it."""
    requests_at_once: float = 256.0
    """Of one address (an IPv4 address, an IPv6 /64): so many at once, and then `requests_per_s`."""
    requests_per_s: float = 8.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.life_s <= 7 * 86_400.0:
            raise TrainerUsageError(f"--life-s: expected 1 s to a week, found {self.life_s:g}")


@dataclass(slots=True)
class AuthorityService:
    """One process of an authority; for one event loop, while `register` may be shared with other processes."""

    run_name: str
    identity: Identity
    register: Register
    config: AuthorityConfig
    clock: Callable[[], float] = time.time
    bucket: BucketAddresses | None = None  # Of the run, where members have no keys for it.
    refused: Counter[str] = field(default_factory=Counter, init=False)  # By reason.
    num_admitted: int = field(default=0, init=False)
    _dial_back: DialBack = field(init=False)
    _requests: TokenBuckets = field(init=False)
    _passes: TokenBuckets = field(init=False)
    _log_budget: TokenBuckets = field(init=False)
    _list: tuple[float, RevokedPeers | None] = field(default=(-1.0, None), init=False)
    """The newest list as it was signed last, and when."""

    def __post_init__(self) -> None:
        self._dial_back = DialBack(
            self.identity, self.run_name, allow_private=self.config.allow_private, tls=self.config.tls
        )
        self._requests = TokenBuckets(self.config.requests_at_once, self.config.requests_per_s)
        self._passes = TokenBuckets(_PASSES, _PASSES_PER_S)
        self._log_budget = TokenBuckets(_REFUSALS_LOGGED, _REFUSALS_LOGGED_PER_S)

    async def close(self) -> None:
        """Ends all connections."""
        await self._dial_back.close()
        if self.bucket is not None:
            self.bucket.close()

    def info(self) -> AuthorityInfo:
        """Returns which run this is the authority of."""
        return AuthorityInfo(run_name=self.run_name, issuer=self.identity.peer_id)

    def take_request(self, remote_host: str) -> None:
        """Counts a request of an address, before it is read; raises RefusedError (``rate``)."""
        if not self._requests.take(address_group(remote_host)):
            error = RefusedError(Reason.RATE, "expected fewer requests of this address; try again later")
            self._note_refusal("request", error, remote_host)
            raise error

    async def join(self, wire: bytes, remote_host: str) -> JoinReply:
        """Admits the sender of a join request, or renews its credential; raises RefusedError."""
        try:
            return await self._join(wire, remote_host)
        except RefusedError as error:
            self._note_refusal("join", error, remote_host)
            raise

    async def relay_pass(self, wire: bytes, remote_host: str) -> RelayPassReply:
        """Lets the sender of a join request be reached by relays while it joins; raises RefusedError.

        Whoever may join may have one: a member, a key on the allow-list, or the holder of an invitation, no use of
        which it takes: 16 at once by each, and then one in ten seconds.
        """
        try:
            request, _ = await self._entitled(wire)
            if not self._passes.take(request.token_key or request.peer_id):
                raise RefusedError(Reason.RATE, "expected fewer relay passes by one invitation; try again in a minute")
        except RefusedError as error:
            self._note_refusal("request for a relay pass", error, remote_host)
            raise
        issued = RelayPass.issue(self.identity, self.run_name, request.peer_id, self.clock(), RELAY_PASS_S)
        return RelayPassReply(relay_pass=issued)

    async def check_in(self, wire: bytes, remote_host: str) -> CheckInReply:
        """Notes that a member is there, and returns a newer list of revoked peers; raises RefusedError."""
        try:
            signed = parse_request(SignedCheckIn, wire)
            self._check_addressed(signed.request.run_name, signed.request.sent_at)
            check_check_in_signature(signed)
            request = signed.request
            await asyncio.to_thread(
                self.register.check_in, request.peer_id, request.stage, request.sent_at, self.clock()
            )
        except RefusedError as error:
            self._note_refusal("check-in", error, remote_host)
            raise
        newest = await self.revoked()
        is_news = newest is not None and newest.number > request.known.get(self.identity.peer_id, 0)
        return CheckInReply(revoked=newest if is_news else None)

    async def addresses(self, wire: bytes, remote_host: str) -> AddressReply:
        """Signs addresses of the run's bucket for a member; raises RefusedError."""
        try:
            bucket = self.bucket
            if bucket is None:
                raise RefusedError("role", "expected an authority that signs for a bucket (authority --rounds)")
            signed = parse_request(SignedAddressRequest, wire)
            request = signed.request
            self._check_addressed(request.run_name, request.sent_at)
            check_address_request_signature(signed)
            # First of all a member: keys that are none must not push members' last requests out of what is remembered.
            await asyncio.to_thread(self.register.check_member, request.peer_id, "node", self.clock())
            bucket.take_new(request.peer_id, request.sent_at)
            found = await asyncio.to_thread(bucket.sign, request.peer_id, request.wanted)
        except GenesisError as error:
            logger.error("signing addresses of the bucket: %s", error)
            raise RefusedError(Reason.INTERNAL, "the authority cannot use its bucket now; try again later") from None
        except RefusedError as error:
            self._note_refusal("request for addresses", error, remote_host)
            raise
        return AddressReply(
            addresses=tuple(BucketAddress(url=each.url, headers=each.headers, life_s=each.life_s) for each in found)
        )

    async def revoked(self) -> RevokedPeers | None:
        """Returns the newest list of revoked peers; None: nobody ever was."""
        signed_at, newest = self._list
        number = await asyncio.to_thread(self.register.revoked_number)
        is_current = newest is not None and newest.number == number and self.clock() - signed_at < self.config.life_s
        if number and not is_current:
            number, peers = await asyncio.to_thread(self.register.revoked, self.clock())
            newest = RevokedPeers.issue(self.identity, self.run_name, number, peers, self.clock())
            self._list = (self.clock(), newest)
        return newest

    async def _join(self, wire: bytes, remote_host: str) -> JoinReply:
        request, is_member = await self._entitled(wire)
        if self.config.package_digests and request.package_digest not in self.config.package_digests:
            raise RefusedError(
                "package",
                f"expected installed files with a digest of this run, found {request.package_digest[:16] or 'none'}; "
                f"install its release (here: {request.version or 'not said'})",
            )
        is_reached = await self._is_reached(request, remote_host, is_member=is_member)
        now = self.clock()
        stage = await asyncio.to_thread(
            self.register.admit,
            request,
            self.config.stages,
            is_reached=is_reached,
            now=now,
            expires_at=now + self.config.life_s,
        )
        credential = Credential.issue(
            self.identity, self.run_name, request.peer_id, request.role, stage, now, self.config.life_s
        )
        self.num_admitted += 1
        if not is_member:
            place = f" in {stage}" if stage else ""
            where = f"at {request.address}" if request.address else "without an address"
            logger.info("admitted %s… as %s%s %s", request.peer_id[:16], request.role, place, where)
        return JoinReply(credential=credential, revoked=await self.revoked())

    async def _entitled(self, wire: bytes) -> tuple[JoinRequest, bool]:
        """Returns the request of one who may join, and whether it is a member already; raises RefusedError."""
        signed = parse_request(SignedJoin, wire)
        request = signed.request
        self._check_addressed(request.run_name, request.sent_at)
        check_join_signatures(signed)
        return request, await asyncio.to_thread(self.register.begin_join, request, self.clock())

    async def _is_reached(self, request: JoinRequest, remote_host: str, *, is_member: bool) -> bool:
        """Returns whether the sender's key answers at its address; raises RefusedError where it has to."""
        if self.config.outbound_only and request.role == "node" and not request.address:
            return False
        try:
            await self._dial_back.check(request.peer_id, request.address, remote_host)
        except RefusedError as error:
            if request.role not in _UNREACHED_OK and not is_member:
                raise
            # A member that is busy or restarts is not put out; the list shows that it was not reached.
            logger.debug("%s… is not reached: %s", request.peer_id[:16], error)
            return False
        return True

    def _check_addressed(self, run_name: str, sent_at: float) -> None:
        if run_name != self.run_name:
            raise RefusedError(Reason.RUN, f"expected a request for run {self.run_name!r}, found one for {run_name!r}")
        ahead_s = sent_at - self.clock()
        if abs(ahead_s) > MAX_CLOCK_SKEW_S:
            side = "ahead" if ahead_s > 0 else "behind"
            raise RefusedError(
                Reason.CLOCK,
                f"expected clocks at most {MAX_CLOCK_SKEW_S:g} s apart, found yours {abs(ahead_s):.0f} s {side}; "
                "set it by NTP",
            )

    def _note_refusal(self, what: str, error: RefusedError, remote_host: str) -> None:
        self.refused[error.reason] += 1
        level = logging.INFO if self._log_budget.take("") else logging.DEBUG
        logger.log(level, "refused a %s from %s (%s): %s", what, remote_host, error.reason, error)
