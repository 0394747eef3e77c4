"""A small account, workers that answer what they have counted, and endpoints that keep and ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.pipeline.ledger import AppliedReport, LaneSpec, Layout, LedgerConfig, LedgerSpec
from trainer.pipeline.ledger.ledger import Ledger
from trainer.pipeline.ledger.ledger_state import LedgerState
from trainer.pipeline.ledger.records import RECORD, Opened, Record, WorkerSeen
from trainer.pipeline.ledger.units import Run
from trainer.pipeline.protocol.work import MicroBatchId, Settlement, StageCredit

STAGES = ("head", "body-1", "tail")
WORKER = {"head": "a" * 16, "body-1": "b" * 16, "tail": "c" * 16}
ALIVE = [WorkerSeen(stage=stage, incarnation=WORKER[stage]) for stage in STAGES]
LAYOUT = Layout(num_windows=23, seq_len=10, micro_batch_rows=4, unit_rows=8)
"""Three units a shard, the last of 7 rows: 6 micro-batches, the last of 3 rows."""
SHARDS = (2, 3, 5)


def spec(lanes: int = 1, **changes: object) -> LedgerSpec:
    """Lane n has weight n + 1."""
    lane_specs = tuple(
        LaneSpec(source=None if lanes == 1 else f"s{n}", weight=float(n + 1), first_shard_sha256="0" * 64)
        for n in range(lanes)
    )
    return LedgerSpec(**{"seed": 7, "layout": LAYOUT, "lanes": lane_specs, "stages": STAGES, **changes})


class ListedLedger:
    """A ledger whose records are kept in a list, so that it can be opened again from them."""

    def __init__(
        self, config: LedgerConfig, shards: Sequence[Sequence[int]] = (SHARDS,), *, max_tokens: int = 0
    ) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.shards = shards
        self.spec = spec(len(shards))
        self.records: list[Record] = [Opened(spec=self.spec, shards=tuple(map(len, shards)))]
        self.restart(0.0)

    def restart(self, now_s: float) -> None:
        state = LedgerState.of(list(self.records), self.spec, self.shards)
        self.ledger = Ledger(state, self.config, self.records.append, now_s, max_tokens=self.max_tokens)

    def compact(self, now_s: float) -> None:
        """Replaces the records by a snapshot, and restarts from it as read back."""
        self.records[:] = [RECORD.validate_json(self.state.snapshot().model_dump_json())]
        self.restart(now_s)

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    def given(
        self, driver: str, token: str, units: int = 1, preferred: Sequence[int] = (), now_s: float = 0.0
    ) -> list[MicroBatchId]:
        return micro_batches(self.ledger.lease(driver, token, preferred, units, now_s).runs)

    def perished(self) -> dict[str, int]:
        return {each.stage: each.micro_batches for each in self.ledger.account().perished}

    def lost(self) -> dict[tuple[str, str], int]:
        return {(each.stage, each.reason): each.micro_batches for each in self.ledger.account().lost}


def micro_batches(runs: Sequence[Run]) -> list[MicroBatchId]:
    return list(LAYOUT.micro_batches(*runs))


def credits(number: int, shared_through: int = 0, stages: Sequence[str] = STAGES) -> tuple[StageCredit, ...]:
    return tuple(
        StageCredit(stage=stage, incarnation=WORKER[stage], applied_number=number, shared_through=shared_through)
        for stage in stages
    )


def done(micro_batch: MicroBatchId, number: int = 1, shared_through: int = 0, tokens: int = 0) -> Settlement:
    return Settlement(
        micro_batch=str(micro_batch), outcome="done", credits=credits(number, shared_through), num_tokens=tokens
    )


def invented(micro_batch: MicroBatchId) -> Settlement:
    *others, tail = credits(1)
    return done(micro_batch).model_copy(
        update={"credits": (*others, tail.model_copy(update={"incarnation": "f" * 16}))}
    )


def lost(micro_batch: MicroBatchId, stage: str = "tail", reason: str = "unclear") -> Settlement:
    return Settlement(micro_batch=str(micro_batch), outcome="lost", lost_at=stage, reason=reason)


def report(
    applied: dict[str, Sequence[MicroBatchId]] | None = None, *, answered: Sequence[str] = tuple(WORKER.values())
) -> AppliedReport:
    """What workers say; by default all of them, that they have counted nothing."""
    found = {stage: frozenset(map(str, each)) for stage, each in (applied or {}).items()}
    return AppliedReport(found, frozenset(answered))


def journal_path(folder: Path) -> Path:
    return folder / "ledger" / "journal.jsonl"
