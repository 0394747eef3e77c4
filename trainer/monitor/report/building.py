"""From logs to a `RunReport`: each log once, line by line, then what all of them say together.

A million steps take some 20 s and 100 MB; a node's steps are brought down to arrays when its log is at its end, so many
nodes cost 1 MB each. Broken lines, wrong types, times that cannot be and absurd figures cost their own line only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from genesis import __version__
from trainer.errors import TrainerUsageError
from trainer.monitor.event_log import Event, read_events, read_node_events
from trainer.monitor.pages.texts import NAME, harmless
from trainer.monitor.report import courses
from trainer.monitor.report.courses import NodeCourse, StepColumns
from trainer.monitor.report.event_fields import utc
from trainer.monitor.report.incidents import Incidents
from trainer.monitor.report.inputs import ReportInputs, find_inputs, printed_lines
from trainer.monitor.report.model import (
    DataFacts,
    Figure,
    HeldOutPoint,
    LogText,
    NodeReport,
    OptionValue,
    ReadLog,
    RunReport,
    SampledText,
    Settings,
    Watched,
)
from trainer.monitor.report.node_record import NodeRecord
from trainer.monitor.report.rounds import KEY_SHOWN, Rounds
from trainer.monitor.report.watched import read_watched

logger = logging.getLogger(__name__)

_MAX_NODES: Final = 512
_MAX_LOG_LINES: Final = 200
_MAX_HELD_OUT: Final = 2_000
_MAX_SAMPLES: Final = 60
_MAX_OPTIONS: Final = 2_000
_MAX_PATH: Final = 200
_FIRST_YEAR_AT: Final = 946_684_800.0  # The year 2000: an earlier time is a clock's default.
_AHEAD_S: Final = 86_400.0  # A clock that is further ahead than this is wrong.
_SILENT_S: Final = 30.0
_OWN_OPTIONS: Final = frozenset({"node_id", "rpc.port", "rpc.public_address", "api.port", "discovery.initial_peers"})
"""Options that differ between nodes by their nature."""


def run_report(paths: Sequence[Path], *, title: str = "") -> RunReport:
    """Reads logs into a report.

    Args:
        paths: folders and files as `find_inputs` takes them.
        title: of the report; else the run's name.

    Raises:
        TrainerUsageError: there is no log, or none with an event in it.
    """
    return _Reading(find_inputs(paths), time.time()).report(title)


class _Reading:
    """The state of reading some logs."""

    def __init__(self, inputs: ReportInputs, now: float) -> None:
        self._inputs = inputs
        self._now = now
        self._incidents, self._rounds = Incidents(), Rounds()
        self._records: dict[tuple[Path, str], NodeRecord] = {}
        self._courses: dict[tuple[Path, str], NodeCourse] = {}
        self._mean_losses: dict[tuple[Path, str], float | None] = {}
        self._read: list[ReadLog] = []
        self._left_out: Counter[str] = Counter()

    def report(self, title: str) -> RunReport:
        for path, node in self._inputs.event_logs:
            self._read_events(path, node)
        lines = self._read_processes()
        watched = self._read_histories()
        if not self._records and watched is None:
            shown = ", ".join(harmless(it.path, _MAX_PATH) for it in self._read)
            raise TrainerUsageError(
                f"expected events of a run in {shown}, found none that can be read; give what --log-dir said"
            )
        return self._put_together(title, lines, watched)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_events(self, path: Path, node: str) -> None:
        events = read_node_events(path, node) if node else read_events(path)
        num_events, first, last = 0, None, None
        seen: dict[tuple[Path, str], None] = {}
        for event in events:
            at = event.time.timestamp()
            if not _FIRST_YEAR_AT <= at <= self._now + _AHEAD_S:
                self._left_out["events of a time before 2000 or in the future"] += 1
                continue
            if node and event.node != node:
                self._left_out["events under another node's name than their file's"] += 1
                continue
            record = self._record(path, event)
            if record is None:
                self._left_out[f"events of further nodes than the first {_MAX_NODES}"] += 1
                continue
            seen[path, event.node] = None
            record.add(event)
            num_events += 1
            first, last = at if first is None else min(first, at), at if last is None else max(last, at)
        for key in seen:  # Now, not at the end: a thousand logs must not cost a thousand times as much.
            self._bring_down(key)
        shown = harmless(str(path / f"events-{node}.jsonl" if node else path), _MAX_PATH)
        self._read.append(
            ReadLog(
                path=shown,
                kind="events",
                num_events=num_events,
                first_at=None if first is None else utc(first),
                last_at=None if last is None else utc(last),
            )
        )

    def _record(self, path: Path, event: Event) -> NodeRecord | None:
        key = (path, event.node)
        found = self._records.get(key)
        if found is None and len(self._records) < _MAX_NODES:
            name = harmless(event.node, NAME)
            if any(node == event.node for _, node in self._records):
                name = harmless(f"{path.name}: {event.node}", 2 * NAME)
            found = self._records[key] = NodeRecord(name, name, self._incidents, self._rounds)
        return found

    def _bring_down(self, key: tuple[Path, str]) -> None:
        record = self._records[key]
        self._mean_losses[key] = record.mean_loss()
        self._courses[key] = NodeCourse(
            name=record.name,
            stage=record.stage,
            losses=StepColumns.of(record.course),
            gradients=StepColumns.of(record.gradients),
            marks=tuple(record.marks),
        )
        record.forget_steps()

    def _read_processes(self) -> tuple[LogText, ...]:
        lines: list[LogText] = []
        for path in self._inputs.process_logs:
            found, num_lives = printed_lines(path)
            lines += found
            shown = harmless(str(path), _MAX_PATH)
            self._read.append(ReadLog(path=shown, kind="process", num_events=num_lives, first_at=None, last_at=None))
        lines.sort(key=lambda it: it.at)
        if len(lines) > _MAX_LOG_LINES:
            self._left_out["warnings and errors that processes printed before those shown"] += (
                len(lines) - _MAX_LOG_LINES
            )
        return tuple(lines[-_MAX_LOG_LINES:])

    def _read_histories(self) -> Watched | None:
        found: Watched | None = None
        for path in self._inputs.histories:
            watched = read_watched(path, self._incidents)
            points = watched.points
            self._read.append(
                ReadLog(
                    path=harmless(str(path), _MAX_PATH),
                    kind="history",
                    num_events=len(points),
                    first_at=points[0].at if points else None,
                    last_at=points[-1].at if points else None,
                )
            )
            if found is None or len(points) > len(found.points):
                found = watched
        if len(self._inputs.histories) > 1:
            self._left_out["histories of monitors beside the longest, but for their alarms"] += (
                len(self._inputs.histories) - 1
            )
        return found

    def _note_silence(self) -> None:
        """Notes the nodes whose logs end without an end while others went on."""
        latest = max((record.last_at for record in self._records.values()), default=0.0)
        for record in self._records.values():
            if record.lives and record.lives[-1].outcome == "open" and latest - record.last_at > _SILENT_S:
                text = "its log ends here while others went on: killed, cut off, or copied before its end"
                self._incidents.note("death", record.name, record.last_at, text)

    # -- all together --------------------------------------------------------------------------------------------------

    def _put_together(self, title: str, lines: tuple[LogText, ...], watched: Watched | None) -> RunReport:
        records = sorted(self._records.items(), key=lambda item: natural_key(item[1].name))
        nodes = tuple(_node(record, self._mean_losses[key]) for key, record in records)
        drawn = [self._courses[key] for key, _ in records]
        trained = [self._courses[key] for key, record in records if record.role == "driver"] or drawn
        self._note_silence()
        times = [at for record in self._records.values() for at in (record.first_at, record.last_at)]
        settings = _settings([record for _, record in records])
        names = {record.peer_id: record.name for record in self._records.values()}
        rounds = self._rounds.all(names)
        held_out = _held_out([record for _, record in records])
        for text in self._incidents.left_out():
            self._left_out[text] += 0
        if self._rounds.rounds_a_row > 1:
            self._left_out[f"single rounds: {self._rounds.rounds_a_row} in a row share one line"] += 0
        return RunReport(
            title=harmless(title, NAME) or settings.run_id or "run",
            made_at=utc(self._now),
            software=__version__,
            first_at=utc(min(times)) if times else watched.points[0].at if watched and watched.points else None,
            last_at=utc(max(times)) if times else watched.points[-1].at if watched and watched.points else None,
            settings=settings,
            figures=tuple(_figures(nodes, watched)),
            nodes=nodes,
            loss_by_step=courses.losses(trained, "step"),
            loss_by_tokens=courses.losses(trained, "tokens"),
            course_by_time=courses.over_time(trained),
            gradient_norm=courses.gradient_norms(drawn),
            held_out_by_step=courses.held_out(held_out),
            round_seconds=courses.round_seconds(rounds),
            watched_by_time=courses.watched(watched.points if watched is not None else ()),
            rounds=rounds,
            incidents=self._incidents.all({key[:KEY_SHOWN]: name for key, name in names.items() if key}),
            held_out=held_out,
            samples=_samples([record for _, record in records]),
            data=_data([record for _, record in records]),
            watched=watched,
            log=lines,
            read=tuple(self._read),
            left_out=tuple(f"{count:,} {text}" if count else text for text, count in self._left_out.items()),
            notes=tuple(_notes(nodes, watched)),
        )


def natural_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key by which gpu-2 comes before gpu-10."""
    parts: list[tuple[int, str]] = []
    for char in name:
        is_digit = char.isascii() and char.isdigit()
        if is_digit and parts and parts[-1][0] >= 0:
            parts[-1] = (parts[-1][0] * 10 + int(char), "")
        else:
            parts.append((int(char), "") if is_digit else (-1, char))
    return parts


def _node(record: NodeRecord, loss: float | None) -> NodeReport:
    sums = record.steps
    alive_s = sum(max(0.0, life.last_at - life.began_at) for life in record.lives)
    is_whole = record.num_lives == len(record.lives)
    mfu = None
    if record.flops_per_token and record.peak_flops_per_s and sums.active_s > 0:
        peak = record.peak_flops_per_s * record.num_devices * sums.active_s
        mfu = sums.trained_tokens * record.flops_per_token / peak
    return NodeReport(
        name=record.name,
        node_id=record.node_id,
        role=record.role,
        stage=record.stage,
        peer_id=record.peer_id,
        first_at=utc(record.first_at),
        last_at=utc(record.last_at),
        lives=tuple(life.reported() for life in record.lives),
        num_lives=record.num_lives,
        num_steps=sums.num_steps,
        steps_repeated=sums.repeated,
        steps_skipped=sums.skipped,
        num_tokens=sums.num_tokens,
        active_s=round(sums.active_s, 3),
        loader_wait_s=round(sums.waited_s, 3),
        loss=loss,
        lowest_loss=sums.lowest,
        tokens_per_s=sums.trained_tokens / alive_s if alive_s and is_whole else None,
        mfu=mfu,
        rounds_shared=record.rounds["shared"],
        rounds_alone=record.rounds["alone"],
        rounds_failed=record.rounds["failed"],
        sent_bytes=record.sent_bytes,
        received_bytes=record.received_bytes,
        withdrawals=record.withdrawals,
        num_parameters=record.num_parameters,
        checkpoints=record.checkpoints.reported(),
        machine=record.machine,
    )


def _settings(records: Sequence[NodeRecord]) -> Settings:
    said = [record for record in records if record.options]
    changes = [(at, f"{record.name}: {text}") for record in records for at, text in record.changes]
    run_ids = dict.fromkeys(record.run_id for record in records if record.run_id)
    by_stage = {record.stage: record.num_parameters for record in records if record.num_parameters}
    return Settings(
        run_id=", ".join(list(run_ids)[:4]),
        run_digest=next((record.run_digest for record in records if record.run_digest), ""),
        model=next((record.model for record in records if record.model), {}),
        # Of a model in stages they add up, each stage once.
        num_parameters=sum(number for number in by_stage.values() if number) or None,
        options=tuple(_options(said)),
        changes=tuple(f"{utc(at)} {text}" for at, text in sorted(changes)[-100:]),
    )


def _options(records: Sequence[NodeRecord]) -> Iterator[OptionValue]:
    names = dict.fromkeys(name for record in records for name in record.options)
    for name in list(names)[:_MAX_OPTIONS]:
        values = Counter(record.options[name] for record in records if name in record.options)
        usual = values.most_common(1)[0][0]
        others = [f"{it.name}: {it.options[name]}" for it in records if it.options.get(name, usual) != usual]
        if name in _OWN_OPTIONS and others:
            usual, others = "each node's own", []
        yield OptionValue(
            name=name,
            value=usual,
            is_changed=any(name in record.options_changed for record in records),
            differs=harmless("; ".join(others[:8])) + (f"; {len(others) - 8} more" if len(others) > 8 else ""),
        )


def _held_out(records: Sequence[NodeRecord]) -> tuple[HeldOutPoint, ...]:
    found = [
        HeldOutPoint(
            node=record.name,
            at=utc(it.at),
            step=it.step,
            loss=it.loss,
            bits_per_byte=it.bits_per_byte,
            by_source=it.by_source,
        )
        for record in records
        for it in record.held_out
    ]
    every = 1 + len(found) // _MAX_HELD_OUT
    return tuple(sorted(found, key=lambda it: (it.step, it.node))[::every])


def _samples(records: Sequence[NodeRecord]) -> tuple[SampledText, ...]:
    found = [
        SampledText(node=record.name, at=utc(it.at), step=it.step, prompt=it.prompt, text=it.text)
        for record in records
        for it in record.samples
    ]
    return tuple(sorted(found, key=lambda it: (it.step, it.node))[-_MAX_SAMPLES:])


def _data(records: Sequence[NodeRecord]) -> DataFacts:
    shards = set().union(*(record.data.all_shards for record in records)) if records else set()
    changes = sorted((at, f"{record.name}: {text}") for record in records for at, text in record.data.changes)
    options = [record.options for record in records if record.options]
    store = next((it["data.store"] for it in options if "data.store" in it), "")
    prefix = "data.sources."
    sources = dict.fromkeys(
        f"{name.removeprefix(prefix)} {value}"
        for it in options
        for name, value in it.items()
        if name.startswith(prefix)
    )
    return DataFacts(
        store=store,
        sources=tuple(list(sources)[:64]),
        num_shards=len(shards) or None,
        num_rotations=sum(record.data.num_rotations for record in records),
        store_shards=max((it.data.store_shards for it in records if it.data.store_shards), default=None),
        vocabulary_rows=max((it.data.vocabulary_rows for it in records if it.data.vocabulary_rows), default=None),
        changes=tuple(f"{utc(at)} {text}" for at, text in changes[-100:]),
    )


def _figures(nodes: Sequence[NodeReport], watched: Watched | None) -> Iterator[Figure]:
    drivers = [node for node in nodes if node.role == "driver"]
    trained = drivers or nodes
    who = "drivers" if drivers else "nodes"
    losses = [node.loss for node in trained if node.loss is not None]
    lowest = [node.lowest_loss for node in nodes if node.lowest_loss is not None]
    if losses:
        how = f"mean over the {who} of the last hundredth of their steps, 10 at least, as logged"
        yield Figure(name="loss at the end", value=sum(losses) / len(losses), unit="nats a token", how=how)
    if lowest:
        yield Figure(name="lowest loss of a step", value=min(lowest), unit="nats a token", how="as logged, any node")
    tokens = sum(node.num_tokens for node in trained)
    how = f"summed over the {who}; of a step done twice the last counts, steps before a log's first as that one"
    yield Figure(name="tokens", value=float(tokens), unit="tokens", how=how)
    ends = [life.last_step + 1 for node in trained for life in node.lives if life.last_step is not None]
    yield Figure(
        name="steps", value=float(max(ends, default=0)), unit="steps", how="of the schedule, as far as any got"
    )
    speeds = [node.tokens_per_s for node in trained if node.tokens_per_s is not None]
    if speeds:
        how = f"summed over the {who}: each one's tokens over the time from first to last event of its lives"
        yield Figure(name="speed", value=sum(speeds), unit="tokens/s", how=how)
    mfus = [node.mfu for node in nodes if node.mfu is not None]
    if mfus:
        how = "FLOPs the model needs for the tokens, over the devices' peak in the time of the steps; mean over nodes"
        yield Figure(name="MFU", value=sum(mfus) / len(mfus), unit="of 1", how=how)
    sent = sum(node.sent_bytes for node in nodes)
    yield Figure(name="bytes sent in rounds", value=float(sent), unit="bytes", how="of rounds with a result, all nodes")
    shared, failed = sum(node.rounds_shared for node in nodes), sum(node.rounds_failed for node in nodes)
    if shared + failed:
        how = "rounds with others' work in the result, of those and the failed ones; each member's counts"
        yield Figure(name="rounds that succeeded", value=shared / (shared + failed), unit="of 1", how=how)
    if watched is not None and watched.points:
        most = max(point.nodes for point in watched.points)
        yield Figure(name="nodes at once, at most", value=float(most), unit="nodes", how="as a monitor saw them")


def _notes(nodes: Sequence[NodeReport], watched: Watched | None) -> Iterator[str]:
    yield (
        "Every figure is what a node wrote into its own log, on its own clock. Nothing here was measured by anybody "
        "else, except what is named as a monitor's."
    )
    yield "A loss is the mean over a step's tokens, in nats; a curve's band goes from the lowest to the highest."
    yield "Speed is tokens over the time from step to step, with rounds and waits, without what lies between two lives."
    if any(not node.role for node in nodes):
        yield (
            "Some logs are of a release that did not log what a process was started with: of these nodes machine, "
            "versions and options are unknown, and restarts show only where steps were done again."
        )
    if any(node.role == "driver" for node in nodes):
        yield (
            "Tokens, speed and loss of the run are the drivers': each token is counted once there, and once in each "
            "stage at the workers."
        )
    if watched is not None:
        yield (
            "PFLOP, hours and tokens of contributions are claims of the nodes; confirmed is what the account of the "
            "run's data bears out (docs/monitor.md)."
        )
