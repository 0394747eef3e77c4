"""Members of rounds through a bucket, in threads of this process: what they bring, and what they end with."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor
from typing_extensions import Buffer

from genesis.errors import StoreUnavailableError
from genesis.store.base import CachePolicy, ObjectInfo, Store, StoredObject
from genesis.store.folder import FolderStore
from trainer.aggregation import RuleConfig
from trainer.bucket_rounds.collective import BucketCollective
from trainer.bucket_rounds.config import BucketConfig
from trainer.bucket_rounds.documents import Agreement
from trainer.bucket_rounds.forms import DenseForm
from trainer.bucket_rounds.keeping import Keeping
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.rules import RoundRules
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.compression.vectors import codec_named
from trainer.network.rpc import Identity
from trainer.outer.engine.collective import Contribution, RoundResult

T = TypeVar("T")

NUM_VALUES = 3000
FAST = BucketConfig(
    url="test", poll_interval_s=0.02, watch_interval_s=0.05, propose_after_s=0.5, few_members_after_s=4.0
)


def settings_of(
    store: Store,
    *,
    identity: Identity | None = None,
    codec: str = "fp32",
    rule: RuleConfig | None = None,
    config: BucketConfig = FAST,
    gather_timeout_s: float = 1.0,
    **changes: object,
) -> BucketSettings:
    """Settings of one member of a run called ``test``."""
    rules = RoundRules(
        run_id="test",
        quorum=config.quorum,
        max_members=config.max_members,
        gather_timeout_s=gather_timeout_s,
        few_members_after_s=config.few_members_after_s,
        propose_after_s=config.propose_after_s,
    )
    made = BucketSettings(
        identity=identity or Identity.create(),
        place=Place(store),
        rules=rules,
        rule=rule or RuleConfig(rule="mean", validation="off"),
        config=config,
        form_of=lambda num_values: DenseForm(codec_named(codec), num_values, num_threads=1),
        round_timeout_s=60.0,
        invite_after_s=0.2,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


_UNCLOSED: list[BucketCollective] = []


def close_collectives() -> None:
    """Ends the threads of all replicas that a test has made: each looks at the bucket some times a second."""
    while _UNCLOSED:
        _UNCLOSED.pop().close()


@dataclass
class Replica:
    """A vector that follows the rounds as DiLoCo's anchor does, and is saved after each."""

    settings: BucketSettings
    num_values: int = NUM_VALUES
    anchor: Tensor = field(init=False)
    reference: Tensor = field(init=False)
    residual: Tensor | None = None
    round_index: int = 0
    lie: Callable[[Tensor], Tensor] = lambda vector: vector
    collective: BucketCollective = field(init=False)
    keeping: Keeping = field(init=False)
    agreements: list[Agreement] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    results: list[RoundResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.anchor, self.reference = torch.zeros(self.num_values), torch.zeros(self.num_values)
        self.keeping = Keeping(self.settings, StoreClock())
        self.collective = BucketCollective(
            self.settings, self.keeping.is_snapshot_due, committed=self.agreements.append
        )
        _UNCLOSED.append(self.collective)

    def digest(self) -> str:
        return hashlib.sha256(self.anchor.numpy().tobytes()).hexdigest()

    def work(self) -> Tensor:
        """What this member brings to the round, the same whenever it is asked."""
        seed = f"{self.settings.own_id}:{self.round_index}"
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(40))
        common = torch.linspace(-1, 1, self.num_values)
        return self.lie(common + 0.1 * torch.randn(self.num_values, generator=generator))

    def contribution(self, num_batches: int = 4) -> Contribution:
        return Contribution(
            round_index=self.round_index,
            vector=self.work(),
            num_batches=num_batches,
            age_s=1.0,
            reference=self.reference,
            state_digest=self.digest(),
            residual=self.residual,
        )

    def take_part(self, num_batches: int = 4) -> RoundResult:
        result = self.collective.reduce(self.contribution(num_batches))
        self.anchor = self.anchor - 0.5 * result.vector
        self.reference, self.residual = result.vector, result.residual
        self.round_index += 1
        self.digests[self.round_index] = self.digest()
        self.results.append(result)
        return result

    def keep(self) -> None:
        """What a node does behind a round: says what it holds, stores it where it is asked to, removes what is old."""
        self.keeping.record(self.agreements[-1], self.digest(), self.packed)
        self.keeping.remove_old(self.agreements[-1])

    def packed(self) -> tuple[dict[str, JsonValue], dict[str, Tensor]]:
        return {"round_index": self.round_index}, {"anchor": self.anchor, "reference": self.reference}

    def take_part_and_keep(self) -> RoundResult:
        result = self.take_part()
        self.keep()
        return result

    def reborn(self, store: Store) -> Replica:
        """The same member in a new process, which goes on from what was saved after its last whole round."""
        place = Place(store)
        again = Replica(replace(self.settings, place=place), self.num_values, lie=self.lie)
        again.anchor, again.reference, again.residual = self.anchor, self.reference, self.residual
        again.round_index, again.digests = self.round_index, dict(self.digests)
        return again

    def adopt(self, other: Replica) -> None:
        self.anchor, self.reference = other.anchor.clone(), other.reference.clone()
        self.round_index, self.residual = other.round_index, None


def folder(path: Path) -> Store:
    return FolderStore(path)


def run_of(path: Path, count: int = 3, *, gather_timeout_s: float = 1.0, **options: Any) -> list[Replica]:
    """Members of a run over a folder; ``options`` are those of `BucketConfig`."""
    config = replace(FAST, **options)
    return [Replica(settings_of(folder(path), config=config, gather_timeout_s=gather_timeout_s)) for _ in range(count)]


def rounds(replicas: list[Replica], count: int = 1) -> float:
    """Makes rounds of all these members, with what they do behind each; returns the seconds that took."""
    began_s = time.monotonic()
    for _ in range(count):
        together({str(number): each.take_part_and_keep for number, each in enumerate(replicas)})
    return time.monotonic() - began_s


class KilledError(BaseException):
    """What ends a member as SIGKILL ends a process: no code of it runs any more, but for what leaves the thread."""


class Interposed:
    """A store in which something happens before or after a call: ``before`` and ``after`` get its name and key."""

    def __init__(
        self,
        store: Store,
        before: Callable[[str, str], None] = lambda _name, _key: None,
        after: Callable[[str, str], None] = lambda _name, _key: None,
    ) -> None:
        self._store = store
        self._before = before
        self._after = after

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def received_bytes(self) -> int:
        return self._store.received_bytes

    @property
    def conditional_writes(self) -> bool:
        return self._store.conditional_writes

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        return self._around("get", key, lambda: self._store.get(key, max_bytes=max_bytes))

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int | None = None) -> StoredObject | None:
        return self._around("get", key, lambda: self._store.get_if_changed(key, etag, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo | None:
        return self._around("head", key, lambda: self._store.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self._around("list", prefix, lambda: [*self._store.list(prefix)]))

    def put(
        self, key: str, body: Buffer, *, cache: CachePolicy, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        return self._around(
            "put", key, lambda: self._store.put(key, body, cache=cache, if_absent=if_absent, if_match=if_match)
        )

    def delete(self, key: str) -> None:
        self._around("delete", key, lambda: self._store.delete(key))

    def close(self) -> None:
        self._store.close()

    def _around(self, name: str, key: str, call: Callable[[], T]) -> T:
        self._before(name, key)
        result = call()
        self._after(name, key)
        return result


class Killing:
    """Raises `KilledError` at the so-many-th call of a store, before it or after it, and at every one from then on."""

    def __init__(self, number: int, *, after: bool) -> None:
        self._left = number
        self._after = after
        self._dead = False
        self._guard = threading.Lock()

    def over(self, store: Store) -> Interposed:
        return Interposed(store, self._before_call, self._after_call)

    def _before_call(self, _name: str, _key: str) -> None:
        if threading.current_thread().name == "bucket-watch":  # Whose end nobody waits for.
            if self._dead:
                raise StoreUnavailableError("the process is gone")
            return
        with self._guard:
            self._left -= 1
            if self._dead or (self._left <= 0 and not self._after):
                self._dead = True
                raise KilledError

    def _after_call(self, _name: str, _key: str) -> None:
        if threading.current_thread().name == "bucket-watch":
            return
        with self._guard:
            if self._dead or self._left <= 0:
                self._dead = True
                raise KilledError


def together(calls: Mapping[str, Callable[[], object]], timeout_s: float = 120.0) -> dict[str, object]:
    """Calls all at once, each in a thread; returns the results, or raises the first error."""
    futures: dict[str, Future[object]] = {name: Future() for name in calls}

    def run(name: str) -> None:
        try:
            futures[name].set_result(calls[name]())
        except BaseException as error:  # noqa: BLE001 - raised again below
            futures[name].set_exception(error)

    for name in calls:
        threading.Thread(target=run, args=(name,), name=name, daemon=True).start()
    return {name: future.result(timeout_s) for name, future in futures.items()}
