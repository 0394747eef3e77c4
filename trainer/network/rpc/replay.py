"""Remembers the requests of the last minutes, so that none is obeyed twice.

A request is remembered by (sender, nonce) until it is too old for the clock check anyway, in buckets of an eighth of
that time, which go whole. Memory is bounded per sender and in all: when full, new requests are refused, and nothing
is forgotten early, because a forgotten request can be replayed. So the bound per sender is also its rate: 65,536
requests in 120 s. A clock that is set back reopens nothing: what expired once stays refused.

Senders that are not proven (`trainer.network.rpc.standing`) share a token bucket with all others of their address. It
lets a quarter of all that is remembered through, so that no host alone can use up the memory. As those requests are
spread over time, a newcomer behind the address of a flood gets in within a few attempts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from trainer.errors import RefusedError
from trainer.network.rpc.limits import unproven_part
from trainer.network.rpc.messages import PeerId, Reason
from trainer.network.rpc.standing import Share
from trainer.network.rpc.token_buckets import TokenBuckets, count_down

__all__ = ["ReplayGuard"]

_BUCKETS_PER_WINDOW = 8
_ADDRESS_PART = 0.25


class ReplayGuard:
    """The requests of one endpoint that could still be replayed; clocks may differ by ``window_s``."""

    def __init__(
        self, *, window_s: float, max_entries: int, max_entries_per_peer: int, now: Callable[[], float] = time.time
    ) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _BUCKETS_PER_WINDOW
        self._max_entries = max_entries
        self._max_entries_per_peer = max_entries_per_peer
        self._now = now
        self._buckets: dict[int, dict[PeerId, set[bytes]]] = {}
        self._entries_of: Counter[PeerId] = Counter()
        self._num_entries = 0
        self._unproven_of: Counter[int] = Counter()
        most = max(1.0, max_entries * _ADDRESS_PART)
        # An entry stays for as long as two windows and a bucket, if its sender's clock is a window ahead.
        self._allowances = TokenBuckets(most / 4, most * 3 / 4 / (2 * window_s + self._bucket_s), now)
        self._expired_bucket = -1

    def __len__(self) -> int:
        return self._num_entries

    def check_clock(self, sent_at: float) -> None:
        """Checks that a request was sent within the window; so cheap that it comes before the signature.

        Raises:
            RefusedError: ``clock``, with the difference in seconds.
        """
        difference_s = sent_at - self._now()
        if abs(difference_s) > self._window_s or self._bucket_of(sent_at) <= self._expired_bucket:
            raise RefusedError(
                Reason.CLOCK,
                f"expected clocks at most {self._window_s:g} s apart, found yours {abs(difference_s):.1f} s "
                f"{'ahead' if difference_s > 0 else 'behind'}; set both by NTP",
            )

    def remember(self, sender: PeerId, nonce: bytes, sent_at: float, share: Share) -> None:
        """Takes a request whose signature was checked, and whose clock by `check_clock`; refuses it the second time.

        Raises:
            RefusedError: ``replayed``, or ``rate`` when no more can be remembered.
        """
        self._expire()
        for senders in self._buckets.values():
            if nonce in senders.get(sender, ()):
                raise RefusedError(Reason.REPLAYED, "expected a new request, found one that came before")
        num_unproven = self._unproven_of.total()
        if (
            self._num_entries >= self._max_entries
            or self._entries_of[sender] >= self._max_entries_per_peer
            or (not share.is_proven and num_unproven >= unproven_part(self._max_entries))
            or (not share.is_proven and not self._allowances.take(share.key))
        ):
            raise RefusedError(
                Reason.RATE,
                f"expected at most {self._max_entries_per_peer} requests of a node ({self._max_entries} of all) "
                f"within {self._window_s:g} s, found more; call less often",
            )
        bucket = self._bucket_of(sent_at)
        self._buckets.setdefault(bucket, {}).setdefault(sender, set()).add(nonce)
        self._unproven_of[bucket] += not share.is_proven
        self._entries_of[sender] += 1
        self._num_entries += 1

    def _bucket_of(self, sent_at: float) -> int:
        return int((sent_at + self._window_s) / self._bucket_s)

    def _expire(self) -> None:
        current = int(self._now() / self._bucket_s)
        for bucket in [bucket for bucket in self._buckets if bucket < current]:
            del self._unproven_of[bucket]
            for sender, nonces in self._buckets.pop(bucket).items():
                self._num_entries -= len(nonces)
                count_down(self._entries_of, sender, len(nonces))
        self._expired_bucket = max(self._expired_bucket, current - 1)
