"""Who a node is to the others: its key, what it announces, and whether it fits the run it was pointed at.

What a process trains by is compared with what its peers train by. Announcements cost nothing, so only answers count.
One peer that answers and trains alike is enough: a misconfigured newcomer stops no node that has company. Where none
does and one that trains something else has answered for a while, the process ends and says what differs. Where peers
are known and none answers, the check goes on beside the work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue

from manifests import Vocabulary
from trainer.collective import Terms
from trainer.collective.messages import INIT_DIGEST, RUN_DIGEST
from trainer.errors import IncompatiblePeerError, RefusedError, RpcError
from trainer.model import ModelConfig
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import PartReport, StageReport
from trainer.network.rpc import Endpoint, Identity, Peer, Reply, Request, load_or_create_identity
from trainer.network.rpc.envelope import PROTOCOL_VERSION
from trainer.run.config import RunConfig, to_mapping
from trainer.run.node.data import lineage_of
from trainer.run.node.gradients import target_tokens_of_node

logger = logging.getLogger(__name__)

T = TypeVar("T")

TERMS = "node/terms"
_LOCAL_GRAD = ("delayed", "ahead_s", "target_tokens")
_SHARED_INNER = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "max_grad_norm",
    "schedule",
    "warmup_steps",
    "decay_end_step",
    "decay_steps",
    "decay_end_tokens",
    "warmup_tokens",
    "decay_tokens",
    "min_lr_ratio",
    "seq_len",
)
"""Options of `InnerConfig` that change the result of a step."""
_PERMANENT = frozenset({"protocol", "run"})  # Reasons to refuse a node that do not change with time.
_MOST_ASKED = 16  # At once, of the peers said to train alike and of strangers; the next ones at the next attempt.
_TIMEOUT_S = 5.0
_SETTLE_S = 3.0  # How long a stranger's answer has to stand at the beginning.
_STANDS_S = 30.0  # The same while the process works: a newcomer that does not fit finds that out and leaves in less.
_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """What a node announces of its training."""

    inner_step: int = 0
    loss: float | None = None  # Averaged over some 50 steps; None before the first.
    tokens_per_s: float = 0.0
    shards: tuple[int, ...] = ()
    stage: StageReport | None = None
    parts: tuple[PartReport, ...] = ()


def identity_path(config: RunConfig) -> Path:
    """Returns the file of a node's key: one a node name, so that the nodes of one machine are several peers."""
    return Path(config.state_dir).expanduser() / "identity" / f"{config.node_id}.pem"


def identity_of(config: RunConfig) -> Identity:
    """Reads a node's key, or creates it; raises what `load_or_create_identity` does."""
    return load_or_create_identity(identity_path(config))


def announcement_of(config: RunConfig, endpoint: Endpoint, terms: Terms, stats: NodeStats) -> Announcement:
    """Builds a node's announcement, not stamped yet."""
    certificate = endpoint.certificate
    return Announcement(
        peer_id=endpoint.peer_id,
        node_id=config.node_id,
        run_id=config.run_id,
        address=endpoint.address,
        certificate_pem=certificate.decode() if certificate else "",
        terms_digest=terms.digest(),
        inner_step=stats.inner_step,
        loss=stats.loss,
        tokens_per_s=stats.tokens_per_s,
        shards=stats.shards[:256],
        stage=stats.stage,
        parts=stats.parts,
    )


def terms_of(config: RunConfig, shape: ModelConfig, vocabulary: Vocabulary) -> Terms:
    """Returns architecture, vocabulary, the weights it began with, and every option that changes a round's result."""
    digest, rank = config.model.init_digest, config.powersgd_rank
    return Terms(
        architecture={name: value for name, value in shape.to_dict().items() if name != "vocab_size"},
        tokenizer_lineage=lineage_of(vocabulary),
        synchronisation={
            "protocol": PROTOCOL_VERSION,
            "seed": config.seed,
            "compression": config.round_options.compression,
            **{f"diloco.{name}": value for name, value in to_mapping(config.diloco).items()},
            **{f"rule.{name}": value for name, value in to_mapping(config.rule).items()},
            **(_gradient_terms(config) if config.strategy == "grad" else {}),
            **(_sparse_terms(config) if config.strategy == "sparseloco" else {}),
            **({INIT_DIGEST: digest} if digest else {}),  # Earlier releases know no such runs,
            **({"powersgd_rank": rank} if rank else {}),  # nor these,
            **({"quorum": config.collective.quorum} if config.collective.quorum else {}),  # nor these,
            **({RUN_DIGEST: config.run_digest} if config.run_digest else {}),  # nor these.
        },
    )


def _gradient_terms(config: RunConfig) -> dict[str, JsonValue]:
    """What decides a step that all nodes take together (strategy grad); nodes of DiLoCo decide their steps alone."""
    inner, grad = to_mapping(config.inner), to_mapping(config.grad)
    shared = {f"inner.{name}": inner[name] for name in _SHARED_INNER}
    shared |= {f"grad.{name}": value for name, value in grad.items() if name not in _LOCAL_GRAD}
    return {"strategy": "grad", **shared, "grad.target_tokens": target_tokens_of_node(config)}


def _sparse_terms(config: RunConfig) -> dict[str, JsonValue]:
    options = {f"sparseloco.{name}": value for name, value in to_mapping(config.sparseloco).items()}
    return {"strategy": "sparseloco", **options}


def register_terms(endpoint: Endpoint, terms: Terms) -> None:
    """Lets an endpoint answer anybody what its node trains, also who knows only its address; terms hold no secrets."""

    async def answer(_request: Request[Terms]) -> Reply[Terms]:
        return Reply(terms)

    endpoint.register(TERMS, Terms, answer, any_recipient=True)


@dataclass(frozen=True, slots=True)
class ComparedPeer:
    """A peer that announces to be of this run."""

    peer: Peer
    node_id: str
    terms_digest: str
    expected: Terms | None
    """What it would have to train by this process's configuration; None: that has no place for it."""
    fits: bool  # Whether it says that it does.


@dataclass(slots=True)
class FitCheck:
    """One process's comparison with the peers ``known`` at a time; for the event loop of its endpoint."""

    endpoint: Endpoint
    own: Terms
    known: Callable[[], Sequence[ComparedPeer]]
    run_id: str
    is_open: bool = field(default=True, init=False)  # Whether no answer that counts has come yet.
    _num_attempts: int = field(default=0, init=False)
    _strange_since_s: float | None = field(default=None, init=False)

    async def begin(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Asks the peers that are known, and those found meanwhile; raises `IncompatiblePeerError` for a misfit."""
        if not self.known():
            self.is_open = False
            return
        while not stop():
            await self._ask(_SETTLE_S)
            if self._strange_since_s is None:
                return
            await asyncio.sleep(_SETTLE_S / 10)

    async def go_on(self) -> None:
        """Asks again until a peer has answered; raises what `begin` does."""
        while self.is_open:
            await asyncio.sleep(_AGAIN_S)
            await self._ask(_STANDS_S)

    async def _ask(self, stands_s: float) -> None:
        known = self.known()
        sizes = Counter(each.terms_digest for each in known)
        alike = self._some([each for each in known if each.fits])
        strangers = [each for each in known if not each.fits]
        strangers = self._some(sorted(strangers, key=lambda each: -sizes[each.terms_digest]))
        self._num_attempts += 1
        if await _first([self._trains_alike(each) for each in alike]):
            self.is_open, self._strange_since_s = False, None
            if strangers:
                logger.warning("some of run %s, such as %s, train something else", self.run_id, strangers[0].node_id)
            return
        difference = await _first([self._difference(each) for each in strangers])
        if difference is None:
            self._strange_since_s = None
            return
        now_s = time.monotonic()
        self._strange_since_s = self._strange_since_s or now_s
        if now_s - self._strange_since_s >= stands_s:
            raise difference

    def _some(self, found: list[ComparedPeer]) -> list[ComparedPeer]:
        first = self._num_attempts * _MOST_ASKED % max(1, len(found))
        return (found[first:] + found[:first])[:_MOST_ASKED]

    async def _trains_alike(self, other: ComparedPeer) -> bool | None:
        terms = other.expected or self.own
        try:
            reply = await self.endpoint.call(other.peer, TERMS, terms, Terms, timeout_s=_TIMEOUT_S)
        except RpcError:
            return None
        return True if reply.body == terms else None

    async def _difference(self, other: ComparedPeer) -> IncompatiblePeerError | None:
        """Returns what differs, where the peer answers and something does."""
        try:
            reply = await self.endpoint.call(other.peer, TERMS, self.own, Terms, timeout_s=_TIMEOUT_S)
        except RefusedError as error:
            return self._misfit(other, error) if error.reason in _PERMANENT else None
        except RpcError as error:
            logger.info("%s: %s", other.node_id, error)
            return None
        if other.expected is None:
            return self._misfit(other, "it has a stage that this run file does not")
        try:
            reply.body.check(other.expected, "this node")
        except RefusedError as error:
            return self._misfit(other, error)
        return None

    def _misfit(self, other: ComparedPeer, why: object) -> IncompatiblePeerError:
        return IncompatiblePeerError(f"{other.node_id} of run {self.run_id} and this one do not fit: {why}")


async def _first(calls: Sequence[Coroutine[Any, Any, T | None]]) -> T | None:
    """Returns the first result that is not None, and cancels the other calls."""
    tasks = [asyncio.ensure_future(each) for each in calls]
    try:
        for done in asyncio.as_completed(tasks):
            if (result := await done) is not None:
                return result
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_addresses(endpoint: Endpoint, terms: Terms, config: RunConfig) -> None:
    """Asks the configured addresses whether they are of this run and protocol; for a process that found no peer."""

    async def ask(address: str) -> None:
        try:
            await endpoint.call(Peer(None, address), TERMS, terms, Terms, timeout_s=config.rpc.stall_timeout_s)
        except RefusedError as error:
            if error.reason in _PERMANENT:
                raise IncompatiblePeerError(str(error)) from error
            logger.info("%s", error)
        except RpcError as error:  # Discovery asks there too, and says so.
            logger.debug("%s", error)

    if not config.discovery.uses_dht:
        await asyncio.gather(*map(ask, config.discovery.initial_peers))
