"""Checks whether a process fits the run it was pointed at, and which states its model can take up.

An announcement outlives its node and costs nothing, so only answers count. One peer that answers and trains alike is
enough; where none does and one answers that trains something else, the process ends and says what differs. So a
misconfigured newcomer stops no node that has company, nor does one with many keys. Lists of peers come piece by piece:
a stranger's answer has to stand for a while, in which others may be heard of. A process that hears of nobody is the
run's first. Where peers are heard of and none answers, the question stays open and is repeated while the process works,
until one has answered. Terms hold no secrets, so anybody may ask for them.

Anybody can announce a state. Its descriptor (some KB) says how many rows of vocabulary it has and how its values lie;
everything else follows from the architecture. So a state that does not fit costs a small request, and neither disk nor
memory. The layout comes from a model without storage (torch's ``meta`` device), in milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from manifests import FIRST_MERGE_ID, MAX_VOCABULARY
from trainer.collective import Terms
from trainer.errors import IncompatiblePeerError, RefusedError, RpcError
from trainer.model import VOCAB_STEP, ModelConfig, Transformer, rows_for
from trainer.network.rpc import Endpoint, Peer, Reply, Request
from trainer.network.transfer import Descriptor, Expectation
from trainer.outer.diloco import FlatLayout, FragmentPlan, synchronised_parameters
from trainer.run.config import RunConfig
from trainer.run.node.shared_files import DilocoStates, check_meta, check_vectors

__all__ = ["TERMS", "Acquaintance", "FitCheck", "StateFit", "ask_addresses", "register_terms", "state_layout"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

TERMS = "node/terms"
"""What a node trains; see `register_terms`."""
_FOR_GOOD = frozenset({"protocol", "run"})
"""Reasons to refuse a node that waiting does not mend."""
_MOST_ASKED = 16
"""At once, of those that are said to train alike and of strangers; the next ones the next time."""
_TIMEOUT_S = 5.0
_SETTLE_S = 3.0
"""How long a stranger's answer has to stand at the beginning."""
_STANDS_S = 30.0
"""The same while the process works: a newcomer that does not fit finds that out and leaves in less."""
_AGAIN_S = 5.0


def register_terms(endpoint: Endpoint, terms: Terms) -> None:
    """Answers whoever asks what this node trains, also by its address alone."""

    async def answer(_request: Request[Terms]) -> Reply[Terms]:
        return Reply(terms)

    endpoint.register(TERMS, Terms, answer, any_recipient=True)


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """Somebody who announces to be of this run."""

    peer: Peer
    node_id: str
    terms_digest: str
    expected: Terms | None
    """What it would have to train by this process's configuration; None: that has no place for it."""
    fits: bool
    """Whether it says that it does."""


class FitCheck:
    """One process's question to the others; for the event loop of its endpoint.

    Args:
        endpoint: its own.
        own: its terms.
        known: all it has heard of, now.
        run_id: for messages.
        clock: seconds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        own: Terms,
        known: Callable[[], Sequence[Acquaintance]],
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_open = True
        """Nobody has answered yet that counts."""
        self._endpoint = endpoint
        self._own = own
        self._known = known
        self._run_id = run_id
        self._clock = clock
        self._times = 0
        self._strange_since_s: float | None = None

    async def begin(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Asks those that are known, and those heard of meanwhile.

        Raises:
            IncompatiblePeerError: this process does not fit, and how.
        """
        if not self._known():
            self.is_open = False
            return
        while not stop():
            await self._ask(_SETTLE_S)
            if self._strange_since_s is None:
                return
            await asyncio.sleep(_SETTLE_S / 10)

    async def go_on(self) -> None:
        """Asks again until somebody has answered.

        Raises:
            IncompatiblePeerError: this process does not fit, and how.
        """
        while self.is_open:
            await asyncio.sleep(_AGAIN_S)
            await self._ask(_STANDS_S)

    async def _ask(self, stands_s: float) -> None:
        known = self._known()
        alike = self._some([each for each in known if each.fits])
        sizes = Counter(each.terms_digest for each in known)
        strangers = self._some(
            sorted((each for each in known if not each.fits), key=lambda each: -sizes[each.terms_digest])
        )
        self._times += 1
        if await self._first([self._is_company(each) for each in alike]):
            self.is_open, self._strange_since_s = False, None
            if strangers:
                logger.warning("some of run %s, such as %s, train something else", self._run_id, strangers[0].node_id)
            return
        difference = await self._first([self._difference(each) for each in strangers])
        if difference is None:
            self._strange_since_s = None
            return
        now_s = self._clock()
        if self._strange_since_s is None:
            self._strange_since_s = now_s
        if now_s - self._strange_since_s >= stands_s:
            raise difference

    def _some(self, found: list[Acquaintance]) -> list[Acquaintance]:
        """The next ones to be asked, or the dead first ones would be asked for ever."""
        first = self._times * _MOST_ASKED % max(1, len(found))
        return (found[first:] + found[:first])[:_MOST_ASKED]

    async def _first(self, asking: Sequence[Coroutine[Any, Any, T | None]]) -> T | None:
        """The first answer that is one."""
        tasks = [asyncio.ensure_future(each) for each in asking]
        try:
            for answered in asyncio.as_completed(tasks):
                if (answer := await answered) is not None:
                    return answer
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _is_company(self, other: Acquaintance) -> bool | None:
        terms = other.expected or self._own
        try:
            reply = await self._endpoint.call(other.peer, TERMS, terms, Terms, timeout_s=_TIMEOUT_S)
        except RpcError:
            return None
        return True if reply.body == terms else None

    async def _difference(self, other: Acquaintance) -> IncompatiblePeerError | None:
        """What differs, where somebody answers, and something does."""
        try:
            reply = await self._endpoint.call(other.peer, TERMS, self._own, Terms, timeout_s=_TIMEOUT_S)
        except RefusedError as error:
            if error.reason not in _FOR_GOOD:
                return None
            return self._misfit(other, error)
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

    def _misfit(self, other: Acquaintance, why: object) -> IncompatiblePeerError:
        return IncompatiblePeerError(f"{other.node_id} of run {self._run_id} and this one do not fit: {why}")


async def ask_addresses(endpoint: Endpoint, terms: Terms, config: RunConfig) -> None:
    """Where nobody is known, asks the addresses the process was given for the reason.

    Raises:
        IncompatiblePeerError: they are of another run, or speak another protocol.
    """
    if not config.discovery.uses_dht:
        asked = (_ask_address(endpoint, terms, address, config) for address in config.discovery.initial_peers)
        await asyncio.gather(*asked)


async def _ask_address(endpoint: Endpoint, terms: Terms, address: str, config: RunConfig) -> None:
    try:
        await endpoint.call(Peer(None, address), TERMS, terms, Terms, timeout_s=config.rpc.stall_timeout_s)
    except RefusedError as error:
        if error.reason in _FOR_GOOD:
            raise IncompatiblePeerError(str(error)) from error
        logger.info("%s", error)
    except RpcError as error:  # Discovery asks there too, and says so.
        logger.debug("%s", error)


_FEWEST_ROWS, _MOST_ROWS = rows_for(FIRST_MERGE_ID), rows_for(MAX_VOCABULARY)


def state_layout(shape: ModelConfig, num_fragments: int) -> FlatLayout:
    """Which value of a shared state is which parameter's, for a model of this shape."""
    with torch.device("meta"):
        model = Transformer(shape)
    return FragmentPlan.of(synchronised_parameters(model), num_fragments).whole()


@dataclass(frozen=True, slots=True)
class StateFit(DilocoStates):
    """What this node can take up.

    Args:
        shape: of its model; other states may have more or fewer rows of vocabulary.
        num_fragments: that it is synchronised in.
        max_bytes: no state larger than this.
    """

    shape: ModelConfig
    num_fragments: int
    max_bytes: int

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """What exactly a state of this descriptor has to be.

        Raises:
            IncompatiblePeerError: it does not fit; the message names the first difference.
        """
        if descriptor.size_bytes > self.max_bytes:
            raise IncompatiblePeerError(
                f"expected a state of at most {self.max_bytes} bytes, found one of {descriptor.size_bytes}"
            )
        meta = check_meta(descriptor.meta)
        if not _FEWEST_ROWS <= meta.vocab_rows <= _MOST_ROWS or meta.vocab_rows % VOCAB_STEP:
            raise IncompatiblePeerError(
                f"expected a state of {_FEWEST_ROWS} to {_MOST_ROWS} rows of vocabulary, in steps of {VOCAB_STEP}, "
                f"found one of {meta.vocab_rows}"
            )
        if meta.fragment >= self.num_fragments:
            raise IncompatiblePeerError(
                f"expected a state whose next fragment is under {self.num_fragments}, found {meta.fragment}"
            )
        layout = state_layout(replace(self.shape, vocab_size=meta.vocab_rows), self.num_fragments)
        layout.require_same(meta.layout_digest, "the state to adopt")
        return check_vectors(descriptor, layout.num_values, max_bytes=self.max_bytes)
