"""Who of the others answers: why not, by whose clock, which release, and whether they train the same.

Addresses of nodes are asked themselves, without a credential: a hello is answered to anybody. Of seeds, which hold no
model and speak the DHT's protocol only, the port is tried, and the nodes that the DHT knows are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from genesis import __version__
from genesis.doctor import Finding
from genesis.doctor.findings import problem_of
from genesis.doctor.store import skew_finding
from trainer.collective import Terms
from trainer.errors import PeerUnavailableError, RefusedError, RpcError, TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.sizing import PRESETS, preset
from trainer.network.reachability import HELLO_METHOD, Hello, HelloReply
from trainer.network.rpc import Endpoint, Peer
from trainer.network.rpc.messages import Reason
from trainer.run.node.identity import TERMS

TIMEOUT_S: Final = 20.0
_CONNECT_S: Final = 5.0
_MAX_UNCERTAIN_S: Final = 5.0
"""An answer that took longer than twice that says nothing of its clock."""
_CURES: Final = {
    "refused": "start the node or seed there, or correct the port",
    "timeout": "correct the address, or open the port in the firewall there, which drops what comes",
    "no_route": "check this machine's network, VPN and IPv6: there is no way from here to that address",
    "name": "correct the host's name, or this machine's name service (DNS)",
    "tls": "correct the port: something else than a node of this run listens there (or the run has rpc.tls=false)",
    "silent": "run it again: something takes connections there and does not answer in time; it is busy, or the link is "
    "slow, or it is no node of this run",
    "another": "leave the key or address out that no longer belongs together: another identity answers there",
    Reason.RUN: "give that run's file (--run) or name (--run-id): the node there is of another run",
    Reason.PROTOCOL: "install the release that the run uses: the node there speaks another protocol",
    Reason.CLOCK: "set the clock by NTP (timedatectl set-ntp true, or start chronyd)",
    Reason.SENDER: "have this node's key added to rpc.allowed_peers there: it takes calls of some keys only",
    Reason.REVOKED: "ask whoever runs this run: its authority has revoked this node's key",
}
_OTHER_CURE: Final = "see the log of the node there; it answers connections, but not as a node of this release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A peer that has answered."""

    peer: Peer
    version: str = ""  # Empty: of a release that has no hello.
    seen_host: str = ""
    offset_s: float | None = None  # How far its clock is ahead; None: not known.

    @property
    def name(self) -> str:
        """For messages."""
        return self.peer.address


@dataclass(frozen=True, slots=True)
class Silence:
    """An address at which no peer of the run has answered."""

    address: str
    cause: str
    text: str

    @property
    def problem(self) -> str:
        """What was found, with the address once."""
        return self.text if self.address in self.text else f"{self.address}: {self.text}"

    @property
    def cure(self) -> str:
        """What to do about it."""
        return _CURES.get(self.cause, _OTHER_CURE)


async def greet(endpoint: Endpoint, peer: Peer, clock: Callable[[], float] = time.time) -> Greeting | Silence:
    """Says hello to a peer; raises nothing that is the peer's or the network's fault."""
    asked_at, began_s = clock(), time.monotonic()
    try:
        reply = await endpoint.call(peer, HELLO_METHOD, Hello(), HelloReply, timeout_s=TIMEOUT_S)
    except RefusedError as error:
        if error.reason in (Reason.METHOD, Reason.CREDENTIAL, Reason.BUSY, Reason.RATE):
            return Greeting(peer=peer)
        return Silence(peer.address, error.reason, problem_of(error))
    except PeerUnavailableError as error:
        cause = error.cause or await connect_cause(peer.address)
        # Had it shown no certificate, the error would say so: it takes connections, and does not answer.
        return Silence(peer.address, error.cause or ("silent" if cause == "tls" else cause), problem_of(error))
    except (RpcError, TrainerUsageError) as error:
        return Silence(peer.address, "", problem_of(error))
    uncertain_s = (time.monotonic() - began_s) / 2
    offset_s = reply.body.now - (asked_at + uncertain_s) if uncertain_s < _MAX_UNCERTAIN_S else None
    return Greeting(
        peer=Peer(reply.sender, peer.address, peer.certificate),
        version=reply.body.version,
        seen_host=reply.body.seen_host,
        offset_s=offset_s,
    )


async def connect_cause(address: str) -> str:
    """Returns why an address cannot be connected to, as `PeerUnavailableError.cause`; ``tls``: it can be."""
    from trainer.network.rpc.config import split_address

    host, port = split_address(address)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    except (OSError, UnicodeError) as error:
        return _cause_of(error)
    return "tls"


def _cause_of(error: OSError | UnicodeError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, socket.gaierror | UnicodeError):
        return "name"
    return "refused" if isinstance(error, ConnectionRefusedError) else "no_route"


def seed_address(multiaddress: str) -> str:
    """Returns ``host:port`` of ``/ip4/HOST/tcp/PORT/p2p/ID``."""
    _, kind, host, _, port, *_ = multiaddress.split("/")
    return f"[{host}]:{port}" if kind == "ip6" else f"{host}:{port}"


def peers_findings(found: Sequence[Greeting | Silence]) -> list[Finding]:
    """Which of the given addresses answer; one is enough."""
    greetings = [each for each in found if isinstance(each, Greeting)]
    silences = [each for each in found if isinstance(each, Silence)]
    findings = []
    if greetings:
        names = ", ".join(each.name for each in greetings)
        findings.append(Finding.ok("network", "peers", f"{names} answers as a node of this run"))
        findings += [Finding.warning("network", "peers", each.problem, each.cure) for each in silences]
    else:
        findings += [Finding.failed("network", "peers", each.problem, each.cure) for each in silences]
    return findings


def clock_findings(found: Sequence[Greeting | Silence], max_skew_s: float) -> list[Finding]:
    """How far this machine's clock is from the others'; more than ``max_skew_s`` and they refuse what it sends."""
    refusals = [each for each in found if isinstance(each, Silence) and each.cause == Reason.CLOCK]
    if refusals:
        first = refusals[0]
        return [Finding.failed("network", "clock", first.problem, first.cure)]
    offsets = [(each.offset_s, each.name) for each in found if isinstance(each, Greeting) and each.offset_s is not None]
    if not offsets:
        return [Finding.skipped("network", "clock", "no peer has told its time")]
    offset_s, name = sorted(offsets)[len(offsets) // 2]
    return [skew_finding("network", "clock", name, offset_s, max_skew_s)]


def version_finding(greetings: Sequence[Greeting]) -> Finding:
    """Whether this release is the others'."""
    others = sorted({each.version for each in greetings if each.version} - {__version__})
    if not any(each.version for each in greetings):
        return Finding.skipped("run", "version", f"{__version__} here; no peer has told its own")
    if others:
        text = f"expected the others' release, found {__version__} here and {', '.join(others)} there"
        cure = f"install the same: pip install 'genesis-training=={others[-1]}'; rounds need one release at all nodes"
        return Finding.warning("run", "version", text, cure)
    return Finding.ok("run", "version", f"{__version__}, as the others")


async def terms_finding(
    endpoint: Endpoint, peers: Sequence[Peer], own_terms: Callable[[Terms], Terms | None]
) -> Finding:
    """Whether the others train what this node would; ``own_terms`` gets theirs and returns what it would have."""
    nothing = Terms(architecture={}, tokenizer_lineage="", synchronisation={})
    why = "no peer has told its own"
    for peer in peers:
        try:
            theirs = (await endpoint.call(peer, TERMS, nothing, Terms, timeout_s=TIMEOUT_S)).body
        except (RpcError, TrainerUsageError) as error:
            why = problem_of(error)
            continue
        own = own_terms(theirs)
        if own is None:
            return Finding.skipped("run", "terms", "what this node would train is not known without its store")
        try:
            theirs.check(own, peer.address)
        except RefusedError as error:
            return Finding.failed("run", "terms", problem_of(error), _terms_cure(error.reason, theirs))
        return Finding.ok("run", "terms", f"model, vocabulary and settings are those of {peer.address}")
    return Finding.skipped("run", "terms", why)


def _terms_cure(reason: str, theirs: Terms) -> str:
    if reason == "vocabulary":
        return "train from the run's store (--store): the ids of this one mean other text"
    if reason == "architecture":
        name = _preset_of(theirs)
        return f"give --preset {name}, as the others have" if name else "give the run's file (--run)"
    return "give the run's file (--run), or the option's value that the others have"


def _preset_of(theirs: Terms) -> str:
    """Returns the preset that others train; empty: none of them."""
    try:
        shape = ModelConfig.from_dict({**theirs.architecture, "vocab_size": 1024})
    except TrainerUsageError:
        return ""
    return next((name for name in PRESETS if preset(name, 1024) == shape), "")
