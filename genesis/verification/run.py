"""The whole verification, in the order that a store at which a populator is at work allows.

The manifest comes first: everything it names was there before it and stays. Shards are read by several threads, so a
bucket is verified at the link's speed; memory is bounded by threads × a shard and what checking it takes (45 MB at the
default size).
"""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from genesis.errors import UsageError
from genesis.store import ReadableStore
from genesis.verification.index import CheckedManifest, IndexWalk, check_checkpoints, check_manifest, goes_on_after
from genesis.verification.report import Counts, Findings, Problem, VerifyReport
from genesis.verification.shards import Listing, ShardCheck, ShardVerdict, check_shard, read_listing
from genesis.verification.vocabularies import check_vocabularies
from manifests import Manifest, format_time

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *%")
_NUMBER = re.compile(r"[0-9]+")
_GIVE_UP_AFTER = 5
"""Shards in a row that the store does not answer for (each after its own retries) before the rest is left."""


@dataclass(frozen=True, slots=True)
class ShardSample:
    """A share of the shards (0 to 1) or a number of them; every shard if both are None."""

    share: float | None = None
    number: int | None = None

    @classmethod
    def parse(cls, text: str) -> ShardSample:
        """``1%``, ``0.5 %`` or a number of shards such as ``100``.

        Raises:
            UsageError: it is neither.
        """
        percent = _PERCENT.fullmatch(text.strip())
        if percent and 0 < float(percent[1]) <= 100:
            return cls(share=float(percent[1]) / 100)
        if _NUMBER.fullmatch(text.strip()) and int(text) > 0:
            return cls(number=int(text))
        raise UsageError(f"--sample: expected a share such as 1% or a number of shards, found {text!r}")

    def choose(self, total_shards: int, seed: int) -> frozenset[int] | None:
        """The shards to read, at least one; None for all."""
        if self.share is not None:
            wanted = max(1, round(total_shards * self.share))
        elif self.number is not None:
            wanted = self.number
        else:
            return None
        if wanted >= total_shards:
            return None
        return frozenset(random.Random(seed).sample(range(total_shards), wanted))


EVERY_SHARD = ShardSample()


def verify_store(
    store: ReadableStore,
    *,
    public_key: Ed25519PublicKey | None = None,
    sample: ShardSample = EVERY_SHARD,
    seed: int | None = None,
    threads: int = 8,
    on_problem: Callable[[Problem], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Checks a store and reports everything that is wrong with it.

    Args:
        store: which; only read.
        public_key: whose signature the manifest must carry; None to ask for none.
        sample: which shards to read; manifest, index and vocabularies are always read whole.
        seed: chooses the sample; by default at random, and the report tells it.
        threads: shards read at once.
        on_problem: told of each problem as it is found.
        on_progress: told (shards read, shards to read) now and then.

    Raises:
        StoreEmptyError: there is no manifest.
        StoreError: the store cannot be read at all.
    """
    started = time.monotonic()
    findings = Findings(on_problem) if on_problem else Findings()
    checked = check_manifest(store, public_key, findings)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    verification = _Verification(store, findings, sample, seed, threads, on_progress)
    if checked.manifest is not None:
        verification.run(checked.manifest)
    return _report(store.url, checked, verification, time.monotonic() - started)


@dataclass(slots=True)
class _Verification:
    """What the steps behind the manifest share."""

    store: ReadableStore
    findings: Findings
    sample: ShardSample
    seed: int
    threads: int
    on_progress: Callable[[int, int], None] | None
    chosen: frozenset[int] | None = None
    vocabularies: int = 0
    segments: int = 0
    sampled: int = 0
    verified: int = 0
    documents: int = 0
    sound: npt.NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    """int8[shards]: 1 of a shard that is sound, −1 of one that is not, 0 of one that was not read."""
    _unreachable: int = field(default=0)

    def run(self, manifest: Manifest) -> None:
        checkpoints = check_checkpoints(self.store, manifest, self.findings)
        listing = read_listing(self.store, manifest, self.findings)
        known = manifest.total_shards if manifest.index else 0
        self.chosen = self.sample.choose(known, self.seed) if known else None
        to_read = known if self.chosen is None else len(self.chosen)
        self.sound = np.zeros(known, np.int8)
        walk = IndexWalk(self.store, manifest, goes_on_after(checkpoints), self.findings)
        self._read_shards(walk.checks(), listing, to_read)
        self.segments = walk.segments
        self.vocabularies = check_vocabularies(
            self.store, manifest, checkpoints, listing, walk.vocabulary_sizes, self.findings
        )
        if listing is not None:
            listing.note_orphans(manifest, self.findings)

    def _read_shards(self, checks: Iterator[ShardCheck], listing: Listing | None, to_read: int) -> None:
        in_flight: deque[Future[ShardVerdict]] = deque()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="verify")
        try:
            for check in checks:
                if self.chosen is None or check.entry.id in self.chosen:
                    in_flight.append(pool.submit(check_shard, self.store, check, self.findings))
                elif listing is not None:
                    self._check_listed(check, listing)
                if len(in_flight) >= 2 * self.threads:
                    self._take(in_flight.popleft().result(), to_read)
                if self._gave_up():
                    return
            while in_flight and not self._gave_up():
                self._take(in_flight.popleft().result(), to_read)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _check_listed(self, check: ShardCheck, listing: Listing) -> None:
        for key, what in listing.problems(check.entry):
            self.sound[check.entry.id] = -1
            self.findings.problem(key, what)

    def _take(self, verdict: ShardVerdict, to_read: int) -> None:
        self.sampled += 1
        self.verified += verdict.sound
        if verdict.unreachable is None:
            self.sound[verdict.shard_id] = 1 if verdict.sound else -1
        self.documents += verdict.num_eos if verdict.sound else 0
        self._unreachable = self._unreachable + 1 if verdict.unreachable else 0
        if self.on_progress is not None:
            self.on_progress(self.sampled, to_read)
        if self._gave_up():
            self.findings.problem(
                self.store.url,
                f"gave up after {_GIVE_UP_AFTER} shards in a row that cannot be read; verify it again later",
            )

    def _gave_up(self) -> bool:
        return self._unreachable >= _GIVE_UP_AFTER


def _report(url: str, checked: CheckedManifest, verification: _Verification, seconds: float) -> VerifyReport:
    findings, manifest = verification.findings, checked.manifest
    return VerifyReport(
        url=url,
        ok=findings.num_problems == 0,
        sequence=manifest.sequence if manifest else None,
        signature=checked.signature,
        key_id=checked.key_id,
        seed=None if verification.chosen is None else verification.seed,
        counts=Counts(
            segments=verification.segments,
            shards=manifest.total_shards if manifest else 0,
            shards_sampled=verification.sampled,
            shards_verified=verification.verified,
            bytes_read=findings.bytes_read,
            tokens_verified=verification.verified * (manifest.shard_tokens if manifest else 0),
            documents_verified=verification.documents,
            vocabularies=verification.vocabularies,
        ),
        num_problems=findings.num_problems,
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
        seconds=round(seconds, 3),
        created_at=manifest.created_at if manifest else None,
        finished_at=format_time(datetime.now(UTC)),
        verified_shards=_runs(verification.sound == 1),
        damaged_shards=_runs(verification.sound == -1),
    )


def _runs(chosen: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """First and last place of each run of true values."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)
    return tuple((first, end - 1) for first, end in edges.tolist())
