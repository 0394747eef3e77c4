"""One node's log, read event by event: its lives, steps, checkpoints, data, and what it ran on.

Memory is bounded however long the log is: steps go into buckets that are coarser the older they are
(`trainer.monitor.pages.step_course`, 2 MB a node), all else into sums and short lists. Of a step that was done again
after a restart the last record counts, exactly within the latest 4,096 steps, and beyond that in proportion.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from trainer.monitor.event_log import Event
from trainer.monitor.pages.step_course import StepCourse, bucket_of
from trainer.monitor.pages.texts import LINE, NAME, harmless
from trainer.monitor.report.event_fields import (
    MAX_WHOLE,
    items_of,
    lines_of,
    mapping_of,
    number_of,
    shown,
    text_of,
    utc,
    whole_of,
)
from trainer.monitor.report.incidents import Incidents
from trainer.monitor.report.model import Life, Machine, NodeCheckpoints
from trainer.monitor.report.rounds import KEY_SHOWN, Rounds, dropped_texts

_EXACT_STEPS: Final = 4_096
_MAX_LIVES: Final = 200
_MAX_TIMES: Final = 400
_MAX_CHANGES: Final = 100
_MAX_HELD_OUT: Final = 1_000
_MAX_SAMPLES: Final = 24
_MAX_OPTIONS: Final = 2_000
_MAX_DEPTH: Final = 6
_MAX_SHARD_IDS: Final = 100_000
MAX_SAMPLE_TEXT: Final = 2_000


class _Step(NamedTuple):
    step: int
    tokens: int  # Of the run, with it.


@dataclass(slots=True)
class OneLife:
    """A process, from its start to its end; times in seconds since 1970."""

    began_at: float
    last_at: float
    first_step: int | None = None
    last_step: int | None = None
    outcome: Literal["ended", "failed", "killed", "open"] = "open"
    reason: str = ""
    is_announced: bool = False  # It began with a ``start`` event.

    def reported(self) -> Life:
        """Returns it for a report."""
        return Life(
            began_at=utc(self.began_at),
            ended_at=utc(self.last_at),
            first_step=self.first_step,
            last_step=self.last_step,
            outcome=self.outcome,
            reason=self.reason,
        )


class Measured(NamedTuple):
    """A measurement of the loss on held-out shards."""

    at: float
    step: int
    loss: float
    bits_per_byte: float | None
    by_source: dict[str, float]


class Sampled(NamedTuple):
    """A sampled text."""

    at: float
    step: int
    prompt: str
    text: str


@dataclass(slots=True)
class StepSums:
    """Sums over a node's steps."""

    num_steps: int = 0
    repeated: int = 0
    skipped: int = 0
    num_tokens: int = 0  # Of the run, as `NodeReport.num_tokens`.
    trained_tokens: int = 0  # Of steps in the log, those that were done again included.
    active_s: float = 0.0
    waited_s: float = 0.0
    lowest: float | None = None


class Checkpoints:
    """What became of a node's checkpoints."""

    def __init__(self) -> None:
        self._counts = {"saved": 0, "skipped": 0, "failed": 0}
        self._seconds = 0.0
        self._last: tuple[float, int | None] | None = None
        self._gap_s: float | None = None
        self._times: list[float] = []
        self._every = 1  # Of so many that were saved, the time of one is kept.

    def add(self, event: Event) -> str:
        """Adds a ``checkpoint`` event; returns its outcome."""
        outcome, at = text_of(event, "outcome", NAME), event.time.timestamp()
        if outcome not in self._counts:
            return ""
        self._counts[outcome] += 1
        self._seconds += number_of(event, "seconds") or 0.0
        if outcome == "saved":
            if self._last is not None:
                self._gap_s = max(self._gap_s or 0.0, at - self._last[0])
            self._last = (at, whole_of(event, "step"))
            if self._counts["saved"] % self._every == 0:
                self._times.append(at)
            if len(self._times) > _MAX_TIMES:
                self._times, self._every = self._times[::2], 2 * self._every
        return outcome

    def reported(self) -> NodeCheckpoints:
        """Returns them for a report."""
        return NodeCheckpoints(
            saved=self._counts["saved"],
            skipped=self._counts["skipped"],
            failed=self._counts["failed"],
            seconds=round(self._seconds, 3),
            last_at=utc(self._last[0]) if self._last else None,
            last_step=self._last[1] if self._last else None,
            longest_gap_s=None if self._gap_s is None else round(self._gap_s, 3),
            times=tuple(map(utc, self._times)),
        )


@dataclass(slots=True)
class DataSeen:
    """What a node read."""

    shards: tuple[int, ...] | None = None
    all_shards: set[int] = field(default_factory=set)
    num_rotations: int = 0
    store_shards: int | None = None
    vocabulary_rows: int | None = None
    changes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))

    def add(self, event: Event) -> None:
        """Adds a ``shards``, ``store`` or ``vocabulary`` event."""
        at = event.time.timestamp()
        if event.kind == "shards":
            found = tuple(it for it in items_of(event, "shards", 1_000) if type(it) is int and 0 <= it <= MAX_WHOLE)
            if self.shards is not None and found != self.shards:
                self.num_rotations += 1
            if found != self.shards:
                self.changes.append((at, f"reads shards {shown(list(found[:24]))}"))
            self.shards = found
            if len(self.all_shards) < _MAX_SHARD_IDS:
                self.all_shards.update(found)
        elif event.kind == "store":
            self.store_shards = whole_of(event, "shards")
            self.changes.append((at, f"the store has {self.store_shards or 0:,} shards"))
        else:
            self.vocabulary_rows = whole_of(event, "rows")
            before = whole_of(event, "before") or 0
            self.changes.append((at, f"vocabulary of {self.vocabulary_rows or 0:,} rows, before {before:,}"))


class NodeRecord:
    """What the log of one node says; ``name`` is its name in the report."""

    def __init__(self, name: str, node_id: str, incidents: Incidents, rounds: Rounds) -> None:
        self.name, self.node_id = name, node_id
        self.role = self.stage = self.peer_id = self.run_id = self.run_digest = ""
        self.lives: deque[OneLife] = deque(maxlen=_MAX_LIVES)
        self.num_lives = 0
        self.num_events = 0
        self.steps = StepSums()
        self.course, self.gradients = StepCourse(is_saved=False), StepCourse(is_saved=False)
        self.checkpoints = Checkpoints()
        self.data = DataSeen()
        self.held_out: deque[Measured] = deque(maxlen=_MAX_HELD_OUT)
        self.samples: deque[Sampled] = deque(maxlen=_MAX_SAMPLES)
        self.rounds = {"shared": 0, "alone": 0, "failed": 0}
        self.sent_bytes = self.received_bytes = 0
        self.withdrawals = 0
        self.num_parameters: int | None = None
        self.flops_per_token: int | None = None
        self.num_devices = 1
        self.peak_flops_per_s: float | None = None
        self.machine: Machine | None = None
        self.model: dict[str, str] = {}
        self.options: dict[str, str] = {}
        self.options_changed: frozenset[str] = frozenset()
        self.changes: deque[tuple[float, str]] = deque(maxlen=_MAX_CHANGES)
        self.marks: deque[tuple[int, float, int, bool]] = deque(maxlen=_EXACT_STEPS)
        """Of rounds: the step before, when, the index, and whether it failed."""
        self._incidents, self._rounds = incidents, rounds
        self._recent: deque[_Step] = deque(maxlen=_EXACT_STEPS)
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._step_at: float | None = None  # When the latest step of this life ended.

    @property
    def first_at(self) -> float:
        """When its first life that is known began."""
        return self.lives[0].began_at if self.lives else 0.0

    @property
    def last_at(self) -> float:
        """When its latest event was."""
        return self.lives[-1].last_at if self.lives else 0.0

    def add(self, event: Event) -> None:
        """Adds the next event of its log."""
        self.num_events += 1
        at = event.time.timestamp()
        if event.kind == "start":
            self._start(event, at)
        elif not self.lives or self.lives[-1].outcome in ("ended", "failed"):
            self._begin_life(at)
        life = self.lives[-1]
        life.last_at = max(life.last_at, at)
        match event.kind:
            case "step":
                self._step(event, at)
            case "round" | "round_failed":
                self._round(event, at)
            case "checkpoint":
                if self.checkpoints.add(event) == "failed":
                    self._incidents.note("checkpoint", self.name, at, "a checkpoint could not be written")
            case "shards" | "store" | "vocabulary":
                self.data.add(event)
            case "held_out":
                self._held_out(event, at)
            case "sample":
                prompt, text = lines_of(event, "prompt", MAX_SAMPLE_TEXT), lines_of(event, "text", MAX_SAMPLE_TEXT)
                self.samples.append(Sampled(at, whole_of(event, "step") or 0, prompt, text))
            case "end":
                self._end(event, at)
            case _:
                self._further(event, at)

    # -- lives ---------------------------------------------------------------------------------------------------------

    def _begin_life(self, at: float) -> OneLife:
        life = OneLife(began_at=at, last_at=at)
        self.lives.append(life)
        self.num_lives += 1
        self._step_at = None
        return life

    def _start(self, event: Event, at: float) -> None:
        before = self.lives[-1] if self.lives else None
        if before is not None and before.outcome == "open":
            before.outcome = "killed"
            text = "ended without a word: killed, or its machine went down"
            self._incidents.note("death", self.name, before.last_at, text)
        life = self._begin_life(at)
        life.is_announced = True
        if before is not None:
            step = whole_of(event, "first_step")
            where = "" if step is None else f", from step {step:,}"
            text = f"started again after {max(0.0, at - before.last_at):.0f} s{where}"
            self._incidents.note("restart", self.name, at, text)
        self._take_facts(event)

    def _end(self, event: Event, at: float) -> None:
        life = self.lives[-1]
        failed = text_of(event, "outcome", NAME) == "failed"
        life.outcome, life.reason = ("failed", text_of(event, "reason")) if failed else ("ended", "")
        if failed:
            self._incidents.note("failed", self.name, at, life.reason or "ended with an error")

    def _take_facts(self, event: Event) -> None:
        """Takes what a process says of itself at its start; the latest counts."""
        self.role = text_of(event, "role", NAME)
        self.stage = text_of(event, "stage", NAME)
        self.peer_id = text_of(event, "peer_id", 64) or self.peer_id
        self.run_id, self.run_digest = text_of(event, "run_id", NAME), text_of(event, "run_digest", 64)
        self.num_parameters = whole_of(event, "num_parameters")
        self.flops_per_token = whole_of(event, "flops_per_token")
        self.num_devices = max(1, whole_of(event, "num_devices") or 1)
        self.model = {harmless(str(name), NAME): shown(it) for name, it in mapping_of(event.fields, "model").items()}
        self.options = dict(list(_flat(mapping_of(event.fields, "options")))[:_MAX_OPTIONS])
        changed = items_of(event, "options_changed", _MAX_OPTIONS)
        self.options_changed = frozenset(it for it in changed if isinstance(it, str))
        peak = mapping_of(event.fields, "peak")
        flops = peak.get("flops_per_s")
        self.peak_flops_per_s = float(flops) if isinstance(flops, int | float) and 0 < flops < 1e30 else None
        self.machine = _machine(event, peak, self.peak_flops_per_s)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, event: Event, at: float) -> None:
        step = whole_of(event, "step")
        if step is None:
            return
        sums, num_tokens = self.steps, whole_of(event, "num_tokens") or 0
        if self._last_step is not None and step <= self._last_step:
            self._goes_back(step, at)
        if self._first_step is None:
            self._first_step, sums.num_tokens = step, min(step * num_tokens, MAX_WHOLE)
        seconds = number_of(event, "seconds") or 0.0
        elapsed_s = seconds if self._step_at is None else max(0.0, at - self._step_at)
        sums.num_steps += 1
        sums.num_tokens += num_tokens
        sums.trained_tokens += num_tokens
        sums.active_s += seconds
        sums.waited_s += number_of(event, "loader_wait_s") or 0.0
        if event.fields.get("skipped") is True:
            sums.skipped += 1
            self._incidents.note("skipped-steps", self.name, at, "loss or gradient not finite: step not applied")
        loss = event.number("loss")
        if math.isfinite(loss):
            sums.lowest = loss if sums.lowest is None else min(sums.lowest, loss)
        self.course.add(bucket_of(step, at, loss, sums.num_tokens, num_tokens, elapsed_s))
        norm = event.number("grad_norm")
        if math.isfinite(norm):
            self.gradients.add(bucket_of(step, at, norm, sums.num_tokens, num_tokens, elapsed_s))
        self._recent.append(_Step(step, sums.num_tokens))
        self._last_step, self._step_at = step, at
        life = self.lives[-1]
        life.first_step = step if life.first_step is None else life.first_step
        life.last_step = step

    def _goes_back(self, step: int, at: float) -> None:
        """Forgets the steps that are done again."""
        sums, last = self.steps, self._last_step or 0
        again = 0
        while self._recent and self._recent[-1].step >= step:
            self._recent.pop()
            again += 1
        if self._recent:
            sums.num_tokens = self._recent[-1].tokens
        else:
            first = self._first_step or 0
            share = max(0.0, (step - first) / max(1, last + 1 - first))
            sums.num_tokens = int(sums.num_tokens * share)
            again = max(again, min(sums.num_steps, last + 1 - max(step, first)))
            self._first_step = min(first, step)
        sums.num_steps = max(0, sums.num_steps - again)
        sums.repeated += again
        if not self.lives[-1].is_announced or self.lives[-1].last_step is not None:
            text = f"went back from step {last:,} to {step:,}: started again, or took up another state"
            is_restart = not self.lives[-1].is_announced
            self._incidents.note("restart" if is_restart else "note", self.name, at, text)
            if is_restart:
                self._begin_life(at)
        self._step_at = None

    def forget_steps(self) -> None:
        """Gives the memory of the buckets back; none is asked for any more."""
        self.course, self.gradients = StepCourse(is_saved=False), StepCourse(is_saved=False)
        self.marks.clear()
        self._recent.clear()

    def mean_loss(self) -> float | None:
        """Returns the mean loss of the last hundredth of the steps, 10 at least."""
        buckets = self.course.between(0, math.inf, 1_000)
        count, total = 0, 0.0
        for bucket in reversed(buckets):
            count, total = count + bucket.num_losses, total + bucket.loss_sum
            if count >= max(10, self.steps.num_steps // 100):
                break
        return total / count if count else None

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _round(self, event: Event, at: float) -> None:
        self._rounds.add(event, text_of(event, "stage", NAME) or self.stage)  # A whole node names that of its part.
        index, failed = whole_of(event, "round_index") or 0, event.kind == "round_failed"
        self.marks.append((self._last_step or 0, at, index, failed))
        if failed:
            self.rounds["failed"] += 1
            reason = text_of(event, "reason") or "no result"
            self._incidents.note("failed-round", self.name, at, reason)
            return
        members = event.fields.get("members")
        self.rounds["shared" if isinstance(members, list) and len(members) > 1 else "alone"] += 1
        self.sent_bytes += whole_of(event, "sent_bytes") or 0
        self.received_bytes += whole_of(event, "received_bytes") or 0
        for text in dropped_texts(event):
            self._incidents.note("left-out", self.name, at, text)

    def _held_out(self, event: Event, at: float) -> None:
        loss = number_of(event, "loss")
        if loss is None:
            return
        sources: dict[str, float] = {}
        for name, part in list(mapping_of(event.fields, "by_source").items())[:32]:
            found = part.get("loss") if isinstance(part, dict) else None
            if isinstance(found, int | float) and math.isfinite(found):
                sources[harmless(name, NAME)] = float(found)
        self.held_out.append(
            Measured(at, whole_of(event, "step") or 0, loss, number_of(event, "bits_per_byte"), sources)
        )

    def _further(self, event: Event, at: float) -> None:
        match event.kind:
            case "withdrew":
                self.withdrawals += 1
                self._incidents.note("withdrawal", self.name, at, text_of(event, "reason") or "took itself out")
            case "ban":
                who, uid = text_of(event, "peer_id", KEY_SHOWN).removesuffix("…"), text_of(event, "worker", NAME)
                seconds = number_of(event, "seconds") or 0.0
                text = f"{who or 'a worker'}: no work for {seconds:.0f} s as {uid}: {text_of(event, 'reason')}"
                self._incidents.note("ban", self.name, at, text)
            case "micro_batch":
                fate, stage = text_of(event, "fate", NAME), text_of(event, "stage", NAME)
                text = f"micro-batch {fate} at {stage or 'no stage'}: {text_of(event, 'reason') or 'no reason given'}"
                self._incidents.note("lost-micro-batches", self.name, at, text)
            case "lost":
                count = whole_of(event, "events") or 1
                text = "events could not be written: the disk was full or failed"
                self._incidents.note("lost-events", self.name, at, text, count=count)
            case "adopted":
                step = whole_of(event, "outer_step")
                text = f"took up the others' state of outer step {step if step is not None else '?'}"
                self._incidents.note("note", self.name, at, text)
            case "run_change":
                number, settings = whole_of(event, "number"), shown(mapping_of(event.fields, "settings"))
                self.changes.append((at, f"change {number} in force: {settings}"))
            case "stage_status":
                stage = text_of(event, "stage", NAME)
                self.stage = stage or self.stage
                self._incidents.note("note", self.name, at, f"{text_of(event, 'status', NAME)} {stage}")
            case _:
                pass


def _machine(event: Event, peak: Mapping[str, object], peak_flops_per_s: float | None) -> Machine:
    said = mapping_of(event.fields, "machine")
    devices = said.get("devices")
    cores, memory = said.get("cores"), said.get("memory_bytes")
    peak_text = ""
    if peak_flops_per_s:
        kind, device = shown(peak.get("kind", ""), NAME), shown(peak.get("device", ""), NAME)
        peak_text = f"{peak_flops_per_s / 1e12:.3g} TFLOP/s {kind} ({device})"
    return Machine(
        host=shown(said.get("host", ""), NAME),
        system=shown(said.get("system", ""), LINE),
        processor=shown(said.get("processor", ""), LINE),
        cores=cores if type(cores) is int and 0 <= cores <= MAX_WHOLE else None,
        memory_bytes=memory if type(memory) is int and 0 <= memory <= MAX_WHOLE else None,
        devices=tuple(
            shown(it.get("name", ""), NAME)
            for it in (devices[:64] if isinstance(devices, list) else [])
            if isinstance(it, dict)
        ),
        peak=peak_text,
        versions={
            harmless(name, NAME): shown(it, NAME)
            for name, it in list(mapping_of(event.fields, "versions").items())[:32]
        },
    )


def _flat(options: Mapping[str, object], prefix: str = "", depth: int = _MAX_DEPTH) -> list[tuple[str, str]]:
    """Returns options by their dotted names, values as text."""
    found: list[tuple[str, str]] = []
    for name, value in list(options.items())[:_MAX_OPTIONS]:
        full = harmless(f"{prefix}{name}", 2 * NAME)
        if isinstance(value, dict) and value and depth:
            found += _flat(value, f"{full}.", depth - 1)
        else:
            found.append((full, shown(value)))
    return found
