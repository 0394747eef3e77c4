"""What a driver holds of the ledger: its leases, what of them it has not begun, and what it has yet to report.

Plain state without a network, so that what may be handed out, and what is owed to the keeper, can be tested. It also
measures how fast the driver gets micro-batches done, and so how many it has to hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from trainer.pipeline.ledger.messages import MAX_SAID, SettleAsk
from trainer.pipeline.protocol.work import LeaseTerm, MicroBatch, MicroBatchId, MicroBatchKey, Settlement

_WINDOW_S = 30.0
_SHORTEST_S = 10.0  # Few micro-batches say little of the speed; until then they count as having taken so long.
_MOST_TIMES = 8192
_BUNDLE_BYTES = 40_000  # Of settlements in one call, whose whole message may have 64 KiB.


class LeaseCache:
    """A driver's side of the ledger. A micro-batch that is not settled but handed back is reported as None."""

    def __init__(self) -> None:
        self.leases: dict[str, LeaseTerm] = {}
        self._lapsed_s: dict[str, float] = {}
        """Those that ran out, and when that was found: what was begun of them may still be settled."""
        self.unread: deque[tuple[str, MicroBatchId]] = deque()  # Leased, rows not read yet; each with its lease.
        self.ready: deque[tuple[str, MicroBatch]] = deque()  # Read, not begun.
        self._begun: dict[MicroBatchKey, str] = {}  # The lease of each that the routing has, and has not reported on.
        self._unreported: dict[str, dict[MicroBatchKey, Settlement | None]] = {}
        """By lease: what the keeper has not acknowledged."""
        self._report_from_s: dict[tuple[str, MicroBatchKey], float] = {}
        """When to repeat settlements that the keeper did not accept yet."""
        self._ended_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self._first_begun_s = math.inf

    @property
    def num_ahead(self) -> int:
        """Micro-batches that are not begun."""
        return len(self.unread) + len(self.ready)

    @property
    def num_begun(self) -> int:
        """Micro-batches that the routing has."""
        return len(self._begun)

    @property
    def num_unreported(self) -> int:
        """Settlements and returns that the keeper has not acknowledged."""
        return sum(map(len, self._unreported.values()))

    def ended_per_s(self, now_s: float) -> float:
        """Returns how many micro-batches end in a second, over the last half minute; 0: none of late."""
        while self._ended_s and self._ended_s[0] <= now_s - _WINDOW_S:
            self._ended_s.popleft()
        return len(self._ended_s) / min(_WINDOW_S, max(_SHORTEST_S, now_s - self._first_begun_s))

    def shards(self) -> list[int]:
        """Returns the shards of what is held, the latest leased first."""
        held = [each.id.shard for _, each in self.ready] + [each.shard for _, each in self.unread]
        return list(dict.fromkeys(reversed(held)))

    def add(self, token: str, micro_batches: Iterable[MicroBatchId], send_before_s: float) -> None:
        """Adds a lease."""
        self.leases[token] = LeaseTerm(send_before_s)
        self.unread.extend((token, each) for each in micro_batches)

    def begin(self, now_s: float) -> MicroBatch | None:
        """Hands out the first micro-batch that is read and whose lease is live."""
        for position, (token, micro_batch) in enumerate(self.ready):
            if now_s < micro_batch.send_before_s:
                del self.ready[position]
                self._begun[micro_batch.key] = token
                self._first_begun_s = min(self._first_begun_s, now_s)
                return micro_batch
        return None

    def settle(self, settlement: Settlement, now_s: float) -> bool:
        """Keeps a settlement to report; returns False if its lease is over or it was settled before."""
        self._ended_s.append(now_s)
        token = self._begun.pop(settlement.micro_batch, None)
        if token is not None:
            self._unreported.setdefault(token, {})[settlement.micro_batch] = settlement
        return token is not None

    def hand_back(self, key: MicroBatchKey) -> None:
        """Gives back one that was begun, but that no stage was asked to apply."""
        token = self._begun.pop(key, None)
        if token is not None:
            self._unreported.setdefault(token, {})[key] = None

    def hand_back_unbegun(self, token: str) -> None:
        """Gives back all of a lease that is not begun."""
        for micro_batch in self._take_unbegun(token):
            self._unreported.setdefault(token, {})[str(micro_batch)] = None

    def have_read(self, token: str, wanted: MicroBatchId, micro_batch: MicroBatch | None) -> None:
        """Keeps the first unread one, whose rows were read; gives it back if they cannot be read here (None)."""
        if not self.unread or self.unread[0] != (token, wanted):  # Its lease was dropped meanwhile.
            return
        self.unread.popleft()
        if micro_batch is None:
            self._unreported.setdefault(token, {})[str(wanted)] = None
        else:
            self.ready.append((token, micro_batch))

    def lapse(self, now_s: float) -> list[str]:
        """Gives up leases that have run out: what was not begun is handed back, what was begun may still be settled.

        None of them is renewed: the keeper asks the workers about what was begun. Returns their tokens.
        """
        over = [token for token, term in self.leases.items() if term.send_before_s <= now_s]
        for token in over:
            self.hand_back_unbegun(token)
            del self.leases[token]
            self._lapsed_s[token] = now_s
        return over

    def forget_lapsed(self, until_s: float = math.inf) -> list[str]:
        """Forgets leases that were found to have run out by then; returns their tokens."""
        over = [token for token, since_s in self._lapsed_s.items() if since_s <= until_s]
        for token in over:
            del self._lapsed_s[token]
            self._forget_begun(token)
        return over

    def drop(self, token: str) -> int:
        """Forgets a lease that is over; returns how many that were begun of it are not settled."""
        term = self.leases.pop(token, None)
        if term is None:
            return 0
        term.send_before_s = 0.0
        self._take_unbegun(token)
        return self._forget_begun(token)

    def bundle(self, now_s: float, *, single: bool = False) -> SettleAsk | None:
        """Returns what to report next, if ``single`` one micro-batch only, to find out which of several is refused."""
        for token, unreported in self._unreported.items():
            settlements: list[Settlement] = []
            size_bytes = 0
            for key, settlement in unreported.items():
                if settlement is None or self._report_from_s.get((token, key), now_s) > now_s:
                    continue
                size_bytes += len(settlement.model_dump_json())
                if settlements and (single or size_bytes > _BUNDLE_BYTES or len(settlements) >= MAX_SAID):
                    break
                settlements.append(settlement)
            back = [key for key, settlement in unreported.items() if settlement is None][: 1 if single else MAX_SAID]
            if single and settlements:
                back = []
            if settlements or back:
                return SettleAsk(token=token, settlements=tuple(settlements), handed_back=tuple(back))
        return None

    def reported(self, bundle: SettleAsk, unheard: Iterable[MicroBatchKey], repeat_from_s: float) -> None:
        """Forgets what the keeper has acknowledged, and leases of which nothing is left.

        Settlements of ``unheard`` micro-batches are repeated from then on.
        """
        token, unreported = bundle.token, self._unreported[bundle.token]
        settled = {each.micro_batch for each in bundle.settlements}
        kept = settled.intersection(unheard)
        self._report_from_s.update(((token, key), repeat_from_s) for key in kept)
        for key in (settled - kept).union(bundle.handed_back):
            unreported.pop(key, None)
            self._report_from_s.pop((token, key), None)
        if unreported:
            return
        del self._unreported[token]
        unbegun = (holder for holder, _ in (*self.unread, *self.ready))
        if token not in self._begun.values() and token not in unbegun:
            self.leases.pop(token, None)

    def _take_unbegun(self, token: str) -> list[MicroBatchId]:
        taken = [each for holder, each in self.unread if holder == token]
        taken += [each.id for holder, each in self.ready if holder == token]
        self.unread = deque(each for each in self.unread if each[0] != token)
        self.ready = deque(each for each in self.ready if each[0] != token)
        return taken

    def _forget_begun(self, token: str) -> int:
        begun = [key for key, holder in self._begun.items() if holder == token]
        for key in begun:
            del self._begun[key]
        return len(begun)
