"""Who may take part in a run that names an authority, as one endpoint knows it; without one there is no `Admission`.

A caller shows its credential once on each connection, beside its first call there, and the callee answers with its own.
Both remember what they have verified, so a message on a known connection costs a look-up (1 µs) and no byte. A peer
that has forgotten it (it restarted, or knows too many) refuses with the reason ``credential``, and is shown it again.
The keys of the authorities need none: they dial back to those that are to be admitted.

A revoked peer is refused from the moment this endpoint hears of it: its calls, calls to it, and within a second what is
under way. The trade-off: the first request to a peer of unknown standing goes out before its answer says who it is, so
requests hold nothing that strangers must not see; answers come only to members.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from trainer.errors import RefusedError
from trainer.network.rpc.credential import MAX_CLOCK_SKEW_S, Credential, RelayPass, RevokedPeers, Role, is_relay_pass
from trainer.network.rpc.messages import PeerId, Reason
from trainer.network.rpc.token_buckets import remember

CREDENTIAL_KEY: Final = "genesis-credential-bin"
"""The metadata of a call in which each side shows its credential."""

MAX_KNOWN: Final = 4096
_RELAYED: Final[frozenset[Role]] = frozenset({"node", "worker", "driver"})
"""Whom others may have to reach."""
_JOIN_HINT: Final = "join the run by its authority (--authority URL --token T)"

logger = logging.getLogger(__name__)


class Admission:
    """The authorities of a run, this node's credential, and what was verified of others; for one event loop."""

    def __init__(self, run_name: str, authorities: Iterable[PeerId], clock: Callable[[], float] = time.time) -> None:
        self.run_name = run_name
        self.authorities = frozenset(authorities)
        self.own: Credential | None = None  # None: this node is not admitted (yet).
        self.num_verified = 0  # Signatures of credentials that were checked.
        self._own_wire = b""
        self._clock = clock
        self._known: OrderedDict[PeerId, tuple[bytes, Credential]] = OrderedDict()
        self._lists: dict[PeerId, RevokedPeers] = {}
        self._revoked: frozenset[PeerId] = frozenset()

    def take_own(self, credential: Credential) -> None:
        """Takes this node's credential, in place of an older one; raises RefusedError where it is not valid."""
        credential.verify(self.run_name, self.authorities, self._clock(), self._revoked)
        self.own, self._own_wire = credential, credential.wire()

    @property
    def own_wire(self) -> bytes:
        """What this node shows; empty while it has no credential."""
        return self._own_wire

    # -- others --------------------------------------------------------------------------------------------------------

    def known(self, peer_id: PeerId) -> Credential | None:
        """Returns the credential of a peer that was verified and is valid now."""
        found = self._known.get(peer_id)
        if found is None:
            return None
        try:
            found[1].check(self.run_name, self.authorities, self._clock(), self._revoked)
        except RefusedError:
            return None
        return found[1]

    def is_member(self, peer_id: PeerId) -> bool:
        """Returns whether a peer may take part, as far as is known here: an authority, or one with a credential."""
        return peer_id in self.authorities or self.known(peer_id) is not None

    def is_revoked(self, peer_id: PeerId) -> bool:
        """Returns whether an authority has revoked a peer."""
        return peer_id in self._revoked

    def contradicts(self, peer_id: PeerId, role: Role, stage: str | None = None) -> bool:
        """Returns whether a peer is revoked, or known to be admitted in another role, or to another stage.

        A worker whose credential names no stage may hold any.
        """
        if peer_id in self._revoked:
            return True
        credential = self.known(peer_id)
        if credential is None:
            return False
        return credential.role != role or (stage is not None and credential.stage not in (None, stage))

    def check_role(self, peer_id: PeerId, roles: Collection[Role] | None) -> None:
        """Raises RefusedError (``role``) where a member is known to have none of these roles; None: any."""
        credential = None if roles is None else self.known(peer_id)
        if roles is not None and credential is not None and credential.role not in roles:
            text = f"expected the credential of a {' or '.join(sorted(roles))}, found that of a {credential.role}"
            raise RefusedError(Reason.ROLE, text)

    def screen(self, peer_id: PeerId, shown: bytes | None) -> Credential | None:
        """Checks what costs no signature; returns the credential whose signature is to be checked, if there is one.

        ``peer_id`` is who a message claims to be from, and ``shown`` what came with it. Raises RefusedError
        (``credential`` or ``revoked``).
        """
        if peer_id in self.authorities:
            return None
        self.check_revoked(peer_id)
        known = self._known.get(peer_id)
        if shown is None or (known is not None and known[0] == shown):
            if known is None:
                text = f"expected a credential by the authority of run {self.run_name!r}, found none; {_JOIN_HINT}"
                raise RefusedError(Reason.CREDENTIAL, text)
            known[1].check(self.run_name, self.authorities, self._clock(), self._revoked)
            return None
        credential = Credential.parse(shown)
        if credential.peer_id != peer_id:
            text = f"expected the credential of {peer_id[:16]}…, found that of {credential.peer_id[:16]}…"
            raise RefusedError(Reason.CREDENTIAL, text)
        credential.check(self.run_name, self.authorities, self._clock(), self._revoked)
        return credential

    def admit(self, credential: Credential | None) -> None:
        """Checks the signature of a credential that passed `screen`, and remembers it; raises RefusedError."""
        if credential is None:
            return
        self.num_verified += 1
        credential.check_signature()
        known = self._known.get(credential.peer_id)
        # An older one that is shown again must not shorten what a newer one allows.
        if known is None or known[1].expires_at <= credential.expires_at:
            remember(self._known, credential.peer_id, (credential.wire(), credential), MAX_KNOWN)

    def until_relayed(self, peer_id: PeerId, shown: bytes) -> float:
        """Checks what a peer shows a relay, its credential or a pass; returns until when it counts, in seconds of 1970.

        Raises RefusedError (``credential``, ``role`` or ``revoked``). Who shows nothing has to be known already.
        """
        if is_relay_pass(shown):
            found = RelayPass.parse(shown)
            if found.peer_id != peer_id:
                text = f"expected the relay pass of {peer_id[:16]}…, found that of {found.peer_id[:16]}…"
                raise RefusedError(Reason.CREDENTIAL, text)
            found.check(self.run_name, self.authorities, self._clock(), self._revoked)
            self.num_verified += 1
            found.check_signature()
            return found.expires_at + MAX_CLOCK_SKEW_S
        self.admit(self.screen(peer_id, shown or None))
        self.check_role(peer_id, _RELAYED)
        if peer_id in self.authorities:
            return float("inf")
        return self._known[peer_id][1].expires_at + MAX_CLOCK_SKEW_S

    def check_still_relayed(self, peer_id: PeerId, until: float) -> None:
        """Raises RefusedError once a peer that a relay carries for is revoked, or what it has shown has expired."""
        self.check_revoked(peer_id)
        if self._clock() >= until:
            raise RefusedError(Reason.CREDENTIAL, "expected a credential that is valid, found that it has expired")

    def check_revoked(self, peer_id: PeerId | None) -> None:
        """Raises RefusedError (``revoked``) for a peer that an authority has revoked."""
        if peer_id in self._revoked:
            raise RefusedError(Reason.REVOKED, f"the run's authority has revoked {str(peer_id)[:16]}…")

    # -- lists of revoked peers ----------------------------------------------------------------------------------------

    @property
    def any_revoked(self) -> bool:
        """Whether any peer is revoked."""
        return bool(self._revoked)

    def numbers(self) -> dict[PeerId, int]:
        """Returns the number of the newest list of each authority."""
        return {issuer: found.number for issuer, found in self._lists.items()}

    def lists(self) -> tuple[RevokedPeers, ...]:
        """Returns the newest list of each authority."""
        return tuple(self._lists.values())

    def newer_than(self, numbers: dict[PeerId, int]) -> RevokedPeers | None:
        """Returns a list that is newer than those with these numbers; None: there is none."""
        return next((found for issuer, found in self._lists.items() if found.number > numbers.get(issuer, 0)), None)

    def revoke(self, news: RevokedPeers) -> bool:
        """Takes a list if it is newer than the known one of its issuer; returns whether it was. Raises RefusedError."""
        known = self._lists.get(news.issuer)
        if known is not None and known.number >= news.number:
            return False
        news.verify(self.run_name, self.authorities, self._clock())
        self._lists[news.issuer] = news
        self._revoked = frozenset().union(*(found.revoked for found in self._lists.values())) - self.authorities
        for peer_id in self._revoked & self._known.keys():
            del self._known[peer_id]
        logger.info("list %d of %s…: %d peers are revoked", news.number, news.issuer[:12], len(news.revoked))
        return True
