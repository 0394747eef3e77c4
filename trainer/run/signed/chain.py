"""`ChangeChain`: the changes of a run as a node knows them, each checked before it counts, and what is in force.

A change is taken if the run's owner signed it for this run, its number is the next, it names the one before by digest,
it is not in force earlier than that one, and the options it leads to make sense to this release. So two nodes that know
change 7 know the same seven, and which of them are in force in a round depends on the round alone. Nothing is ever
taken back: to undo a change, its owner makes another one. The file beside the checkpoints holds the chain, a line
each, so that a node that is started again does not fall behind what it has known, whatever others tell it.
"""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from genesis.file_lock import FileLock, FileLockedError
from trainer.errors import RunFileError, TrainerUsageError
from trainer.network.discovery.records import RecordRefusedError
from trainer.network.discovery.run_change import RUN_CHANGE
from trainer.network.discovery.run_change import RunChange as RunChange
from trainer.run.config import RunConfig, from_mapping, merged, nested, to_mapping
from trainer.run.signed.fields import AUTHORITIES, may_change
from trainer.run.signed.files import KeyField, RunFile, check_config, write_whole

logger = logging.getLogger(__name__)

MAX_CLOCK_SKEW_S: Final = 300.0
_LOCK_S: Final = 1.0
_MAX_CHAIN_BYTES: Final = RUN_CHANGE.max_bytes * RUN_CHANGE.max_count


class ChangeChain:
    """The changes of one run (a `RecordLog`); ``path`` is where they are kept, None: nowhere.

    One thread adds, any thread reads.
    """

    kind = RUN_CHANGE

    def __init__(self, file: RunFile, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._base = check_config(file, f"run {file.name}")
        self._path = path
        self._clock = clock
        self._known: tuple[tuple[RunChange, bytes], ...] = ()  # One assignment a change, so that any thread may read.

    @property
    def changes(self) -> tuple[RunChange, ...]:
        """All changes, in their order; number 1 first."""
        return tuple(change for change, _ in self._known)

    @property
    def newest(self) -> int:
        """Number of the newest change; 0: there is none."""
        return len(self._known)

    def previous_digest(self) -> str:
        """Returns what the next change has to name as the one before it."""
        return self._known[-1][0].digest() if self._known else self._file.digest()

    def number_at(self, round_index: int) -> int:
        """Returns the number of the newest change in force in a round; 0: none is."""
        return bisect.bisect_right([change.at_round for change, _ in self._known], round_index)

    def digest_of(self, number: int) -> str:
        """Returns the digest of a known change, which names all before it; empty for number 0."""
        return self._known[number - 1][0].digest() if number else ""

    def settings_by(self, number: int) -> dict[str, Any]:
        """Returns what the first so many changes set, by dotted name; the latest of each name."""
        settings: dict[str, Any] = {}
        for change, _ in self._known[:number]:
            settings |= change.settings
        return settings

    def authorities_at(self, round_index: int) -> tuple[str, ...]:
        """Returns the keys that may admit nodes in a round; empty: anybody may join."""
        settings = self.settings_by(self.number_at(round_index))
        return tuple(settings.get(AUTHORITIES, self._file.authorities))

    def newest_authorities(self) -> tuple[str, ...]:
        """Returns those keys by the newest change, for whoever takes part in no rounds."""
        settings = self.settings_by(self.newest)
        return tuple(settings.get(AUTHORITIES, self._file.authorities))

    # -- as a log of records -------------------------------------------------------------------------------------------

    def heads(self) -> dict[str, int]:
        """See `RecordLog.heads`."""
        return {self._file.owner: self.newest}

    def newer_than(self, heads: dict[str, int]) -> list[bytes]:
        """See `RecordLog.newer_than`."""
        return [wire for _, wire in self._known[heads.get(self._file.owner, 0) :]]

    def has(self, wire: bytes) -> bool:
        """See `RecordLog.has`."""
        return any(wire == known for _, known in self._known)

    def subkey_of(self, wire: bytes) -> str:
        """See `RecordLog.subkey_of`."""
        return next(change.subkey for change, known in self._known if known == wire)

    def offer(self, wire: bytes) -> bool:
        """Takes a change that follows what is known; raises `RecordRefusedError` for any other, also a known one."""
        change = self._accepted(wire, self._clock())
        logger.info("change %d of run %s: %s", change.number, self._file.name, described(change))
        return True

    def _accepted(self, wire: bytes, now: float) -> RunChange:
        change = RunChange.verified(
            wire, now=now, max_clock_skew_s=MAX_CLOCK_SKEW_S, run_id=self._file.name, signer=self._file.owner
        )
        self._check_place(change)
        self.config_with(change.settings)
        self._known = (*self._known, (change, wire))
        self._write()
        return change

    def config_with(self, settings: Mapping[str, Any]) -> RunConfig:
        """Returns the run file's options with all changes and these settings; raises `RecordRefusedError`.

        Reason ``settings``: something may not change, or has a value that makes no sense.
        """
        for name in settings:
            if not may_change(name):
                raise RecordRefusedError(
                    "settings", f"{name}: expected an option that may change while the run goes on, found another"
                )
        try:
            check_authorities(settings.get(AUTHORITIES, ()))
            found = with_settings(self._base, self.settings_by(self.newest) | dict(settings))
        except TrainerUsageError as error:
            raise RecordRefusedError("settings", str(error)) from None
        if AUTHORITIES in settings and bool(settings[AUTHORITIES]) != bool(self._file.authorities):
            # Nodes that run could neither become members nor forget that they are.
            raise RecordRefusedError(
                "settings",
                f"{AUTHORITIES}: expected {'some' if self._file.authorities else 'none'}, as in the run's file; "
                "whether a run takes members only is settled when it begins (run init --authority)",
            )
        if bool(found.inner.decay_end_tokens) != bool(self._base.inner.decay_end_tokens):
            raise RecordRefusedError(
                "settings",
                "inner.decay_end_tokens: expected a schedule that is counted as the run file's is, by steps or by "
                "tokens, found the other",
            )
        return found

    def _check_place(self, change: RunChange) -> None:
        number, newest = change.number, self.newest
        if number <= newest:
            here = self._known[number - 1][0]
            if here.digest() == change.digest():
                raise RecordRefusedError("known", f"change {number} of run {self._file.name} is known here already")
            raise RecordRefusedError(
                "fork",
                f"the owner of run {self._file.name} has signed TWO changes {number}, by which nodes come apart: "
                f"{here.digest()[:12]} here, which stays, and {change.digest()[:12]} elsewhere",
            )
        if number > newest + 1:
            raise RecordRefusedError(
                "order",
                f"expected change {newest + 1} of run {self._file.name} next, found {number}; fetch those between",
            )
        if change.previous != self.previous_digest():
            raise RecordRefusedError(
                "other", f"change {number} follows another change or run file than this node has of {self._file.name}"
            )
        if newest and change.at_round < (earliest := self._known[-1][0].at_round):
            raise RecordRefusedError(
                "round",
                f"expected it in force from round {earliest} or later, as change {newest}, found {change.at_round}",
            )

    # -- on the disk ---------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Takes up what the file holds; raises `RunFileError` where it holds something else than this run's changes."""
        if self._path is None:
            return
        where = str(self._path)
        try:
            if not self._path.exists():
                return
            if self._path.stat().st_size > _MAX_CHAIN_BYTES:
                raise RunFileError(f"{where}: expected at most {_MAX_CHAIN_BYTES} bytes of changes, found more")
            body = self._path.read_bytes()
        except OSError as error:
            raise RunFileError(f"{where}: cannot be read: {error.strerror}") from error
        self.add_all(split_lines(body), where)

    def add_all(self, wires: Sequence[bytes], where: str) -> None:
        """Adds changes from a file, of which some may be known; raises `RunFileError` for one that has no place."""
        for number, wire in enumerate(wires, 1):
            if self.has(wire):
                continue
            try:
                self._accepted(wire, math.inf)  # It was believed before, however wrong this machine's clock is now.
            except RecordRefusedError as error:
                raise RunFileError(f"{where}: change {number} cannot be used ({error.reason}): {error}") from None

    def _write(self) -> None:
        """Writes the chain, unless the file has a longer one: nodes of one machine share it."""
        if self._path is None:
            return
        body = b"".join(wire + b"\n" for _, wire in self._known)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._path.with_suffix(".lock"), required=False)
            lock.acquire(_LOCK_S)
            with lock:
                if not self._path.exists() or self._path.stat().st_size < len(body):
                    write_whole(self._path, body)
        except (OSError, FileLockedError, RunFileError) as error:
            logger.warning("%s: change %d is not kept on the disk: %s", self._path, self.newest, error)


def split_lines(body: bytes) -> list[bytes]:
    """Returns the records of a file of changes, one a line."""
    return [line for line in body.split(b"\n") if line]


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Returns a configuration with other values of options that may change; raises `TrainerUsageError`."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name != AUTHORITIES:
            section, _, rest = name.partition(".")
            sections[section] = merged(sections.get(section, {}), nested(rest, value))
    changed = {
        section: from_mapping(type(part), merged(to_mapping(part), values), f"{section}.")
        for section, values in sections.items()
        for part in (getattr(config, section),)
    }
    return replace(config, **changed)


def check_authorities(keys: Any) -> None:
    """Raises `TrainerUsageError` unless these are keys that may admit nodes."""
    try:
        TypeAdapter(tuple[KeyField, ...]).validate_python(tuple(keys) if isinstance(keys, list | tuple) else keys)
    except ValidationError:
        raise TrainerUsageError(
            f"{AUTHORITIES}: expected a list of keys of 64 hexadecimal digits, found {str(keys)[:80]}"
        ) from None


def described(change: RunChange) -> str:
    """Returns a change in one line: what it sets and from which round on."""
    settings = ", ".join(f"{name}={_shown(value)}" for name, value in sorted(change.settings.items()))
    return f"{settings} from round {change.at_round}" + (f" ({change.comment})" if change.comment else "")


def _shown(value: Any) -> str:
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, tuple | list) else str(value)[:80]
