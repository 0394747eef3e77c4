"""Curves where people look: TensorBoard, Weights & Biases, trackio, each an optional extra, all behind `Logger`.

They stand beside the event log (`event_log.py`), which has everything; here go the figures one draws. The x axis is the
number of steps taken, and ``tokens`` are a figure of each point. A run keeps its id in the node's checkpoint, so a node
that starts again goes on with its curves; after going on from an older checkpoint no step is there twice: TensorBoard
is told from which step on the older points no longer count, and the other two, which cannot take points back, are not
given a step again (a file of eight bytes remembers the last one).

Guarantees: training queues a point and never waits for a library, a disk or a socket. A library that fails costs
one warning and its own curves. The trade-off: a kill loses the points that wait, and libraries are opened and closed
on the training thread, since two of them print to standard output while they do.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Protocol

from trainer.monitor.facts import EvaluationFacts, RoundFacts, StepFacts

logger = logging.getLogger(__name__)

LoggerName = Literal["tensorboard", "wandb", "trackio"]
Values = Mapping[str, float | str]

_MAX_WAITING: Final = 10_000
_CLOSE_WITHIN_S: Final = 30.0
_OPEN_WITHIN_S: Final = 30
_MARK: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The run whose curves are drawn."""

    id: str
    """The same for as long as the run goes on, of letters and digits."""
    name: str
    """Of the node, for people."""
    group: str
    """Of the run that nodes train together."""
    project: str
    folder: Path
    """Where files are written."""
    first_step: int
    """Steps taken when this process began."""
    options: Mapping[str, Any]
    """The run's configuration, without secrets."""


class Logger(Protocol):
    """One library. Called by one thread at a time; may raise anything."""

    def log(self, step: int, values: Values) -> None:
        """Adds a point; ``step`` rises from call to call."""

    def close(self) -> None:
        """Writes what is left."""


@dataclass(slots=True)
class _TensorBoard:
    """TensorBoard's records, written here: its own writer has a thread whose errors would end as tracebacks."""

    file: BinaryIO
    records: Any

    @classmethod
    def open(cls, curve: Curve) -> Logger:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = curve.folder / "tensorboard" / f"{curve.name}-{curve.id}"
        folder.mkdir(parents=True, exist_ok=True)
        goes_on = any(folder.iterdir())
        now_s, fraction_ns = divmod(time.time_ns(), 10**9)  # Readers take files in the order of their names.
        name = f"events.out.tfevents.{now_s:010d}.{fraction_ns:09d}.{socket.gethostname()}.{os.getpid()}"
        file = (folder / name).open("xb")
        opened = cls(file, RecordWriter(file))
        opened._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if goes_on:  # Points of these steps in the files before are passed over from now on.
            status = SessionLog(status=SessionLog.START)
            opened._write(Event(wall_time=time.time(), step=curve.first_step + 1, session_log=status))
        file.flush()
        return opened

    def log(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import scalar, text

        for name, value in values.items():
            summary = text(name, value) if isinstance(value, str) else scalar(name, value)
            self._write(Event(wall_time=time.time(), step=step, summary=summary))
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def _write(self, event: Any) -> None:
        self.records.write(event.SerializeToString())


@dataclass(slots=True)
class _StepMark:
    """The last step a library was given, in a file that outlives the process."""

    file: int
    step: int

    @classmethod
    def open(cls, curve: Curve, name: str) -> _StepMark:
        curve.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(curve.folder / f"{name}-{curve.id}.step", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        found = os.pread(file, _MARK.size, 0)
        return cls(file, _MARK.unpack(found)[0] if len(found) == _MARK.size else 0)

    def passes(self, step: int) -> bool:
        """Checks whether a step is a new one, and if so marks it, before the library has it: none is there twice."""
        if step <= self.step:
            return False
        os.pwrite(self.file, _MARK.pack(step), 0)
        self.step = step
        return True

    def close(self) -> None:
        os.close(self.file)


@dataclass(slots=True)
class _Marked:
    """A library that cannot take points back."""

    run: Any
    mark: _StepMark

    @classmethod
    def wandb(cls, curve: Curve) -> Logger:
        import wandb

        is_offline = os.environ.get("WANDB_MODE") == "offline"
        curve.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=curve.project,
            id=curve.id,
            name=curve.name,
            group=curve.group,
            dir=curve.folder,
            config=dict(curve.options),
            resume=None if is_offline else "allow",
            # Its capture of standard output would see, and delay, the lines of --json.
            settings=wandb.Settings(console="off", init_timeout=_OPEN_WITHIN_S),
        )
        return cls(run, _StepMark.open(curve, "wandb"))

    @classmethod
    def trackio(cls, curve: Curve) -> Logger:
        import trackio

        run = trackio.init(
            project=curve.project,
            name=f"{curve.name}-{curve.id}",
            group=curve.group,
            config=dict(curve.options),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return cls(run, _StepMark.open(curve, "trackio"))

    def log(self, step: int, values: Values) -> None:
        if self.mark.passes(step):
            self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()
        self.mark.close()


_OPENERS: Final[Mapping[LoggerName, Callable[[Curve], Logger]]] = {
    "tensorboard": _TensorBoard.open,
    "wandb": _Marked.wandb,
    "trackio": _Marked.trackio,
}


def require_loggers(names: Sequence[LoggerName]) -> None:
    """Raises ModuleNotFoundError, which names the module, if a library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@dataclass(slots=True)
class CurveLog:
    """Gives figures to some libraries in a thread of its own. `start` and `close` belong to the training thread.

    A step, an evaluation or a round of the same number of steps taken becomes one point.
    """

    names: Sequence[LoggerName]
    curve: Curve
    every_steps: int = 10
    _loggers: dict[str, Logger] = field(default_factory=dict, init=False)
    _waiting: queue.Queue[tuple[int, Values] | None] = field(
        default_factory=lambda: queue.Queue(_MAX_WAITING), init=False
    )
    _thread: threading.Thread | None = field(default=None, init=False)
    _is_overrun: bool = field(default=False, init=False)

    def start(self) -> None:
        """Opens the libraries; of one that cannot be, there is a warning and no curve."""
        with _nothing_on_stdout():
            for name in self.names:
                with self._surviving(name):
                    self._loggers[name] = _OPENERS[name](self.curve)
        self._thread = threading.Thread(target=self._log_all, name="curves", daemon=True)
        self._thread.start()

    def step(self, step: StepFacts, *, num_tokens: int, loader_wait_s: float) -> None:
        """Adds every so manieth step; ``num_tokens`` are those of the run so far."""
        if (step.step + 1) % self.every_steps:
            return
        values = {"train/loss": step.loss, "train/grad_norm": step.grad_norm, "train/lr": step.lr}
        values |= {"tokens": num_tokens, "speed/step_s": step.seconds, "speed/loader_wait_s": loader_wait_s}
        values |= {"speed/tokens_per_s": step.num_tokens / step.seconds} if step.seconds > 0 else {}
        self._put(step.step + 1, values)

    def evaluation(self, found: EvaluationFacts, *, num_tokens: int) -> None:
        """Adds a measurement: of all sources, of each, and sampled text."""
        values: dict[str, float | str] = {"tokens": num_tokens}
        if found.held_out is not None:
            parts = {"": found.held_out.whole, **{f"/{name}": it for name, it in found.held_out.by_source.items()}}
            for name, part in parts.items():
                values[f"held_out/nats_per_token{name}"] = part.nats_per_token
                values[f"held_out/bits_per_byte{name}"] = part.bits_per_byte
        values |= {f"sample/{number}": f"{it.prompt}|{it.text}" for number, it in enumerate(found.samples)}
        self._put(found.step, values)

    def round(self, step: int, report: RoundFacts, *, outer_step: int) -> None:
        """Adds an outer step, after so many inner ones."""
        values = {"round/outer_step": float(outer_step), "round/members": float(len(report.members))}
        values |= {"round/seconds": report.seconds, "round/completeness": report.completeness}
        self._put(step, values)

    def close(self) -> None:
        """Hands over what waits and closes the libraries; gives up after 30 s on one that does not answer."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            logger.warning("curves: %s did not take the last points in time", ", ".join(self._loggers))
        else:
            with _nothing_on_stdout():
                for name, each in list(self._loggers.items()):
                    with self._surviving(name):
                        each.close()
        self._thread = None

    def _put(self, step: int, values: Values) -> None:
        if self._thread is None:
            return
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            if not self._is_overrun:
                logger.warning("curves: %s take points slower than they come; some are left out", ", ".join(self.names))
            self._is_overrun = True

    def _log_all(self) -> None:
        """Joins what belongs to one step into one point; libraries take each step once."""
        step, values = 0, dict[str, float | str]()
        while True:
            item = self._waiting.get()
            if values and (item is None or item[0] != step):
                for name, each in list(self._loggers.items()):
                    with self._surviving(name):
                        each.log(step, values)
                values = {}
            if item is None:
                return
            step, values = item[0], {**values, **item[1]}

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library of others may raise anything
            self._loggers.pop(name, None)
            first = (str(error).splitlines() or [""])[0][:200]
            logger.warning(
                "%s: %s: %s; training goes on without its curves (the event log has all figures: --log-dir)",
                name,
                type(error).__name__,
                first,
            )


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Sends what libraries print to standard error: standard output has lines for programs."""
    with redirect_stdout(sys.stderr):
        yield
