"""What an authority knows, in one sqlite file: invitations, the allow-list, members, nonces, revocations.

Several authorities may have the file open, on one machine or over a file system with working locks: each change is one
transaction (`BEGIN IMMEDIATE`), on the disk before it is answered. So the last use of an invitation is given once, and
numbers of revocations, which are times in milliseconds, never come twice. Of an invitation only a hash is kept
(`messages.token_hash`).

The trade-off: a member's `seen_at` is written at most every `_SEEN_EVERY_S`, so the number of workers of a stage may be
a minute and a half old; 1,000 members cost 33 writes a second.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from trainer.errors import RefusedError, TrainerError, TrainerUsageError
from trainer.network.rpc.credential import MAX_CLOCK_SKEW_S, MAX_REVOKED, Role
from trainer.network.rpc.messages import PeerId, Reason
from trainer.run.authority.assignment import stage_by_need
from trainer.run.authority.messages import JoinRequest, token_hash

THERE_S: Final = 90.0
"""A member that has not been heard of for so long counts in no stage."""
_SEEN_EVERY_S: Final = 30.0
_LOCK_TIMEOUT_S: Final = 10.0
_FORMAT: Final = 1
_NAME_DIGITS: Final = 8
"""Of an invitation's hash, by which its operator names it."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS invitations (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, uses INTEGER NOT NULL, uses_left INTEGER NOT NULL,
    created_at REAL NOT NULL, expires_at REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS allowed (peer_id TEXT PRIMARY KEY, role TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS members (
    peer_id TEXT PRIMARY KEY, role TEXT NOT NULL, stage TEXT, address TEXT NOT NULL, is_reached INTEGER NOT NULL,
    device TEXT NOT NULL, memory_bytes INTEGER NOT NULL, bandwidth_mbit REAL NOT NULL, version TEXT NOT NULL,
    package_digest TEXT NOT NULL, admitted_by TEXT NOT NULL, admitted_at REAL NOT NULL, seen_at REAL NOT NULL,
    checked_at REAL NOT NULL, expires_at REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS nonces (nonce TEXT PRIMARY KEY, until REAL NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS nonces_until ON nonces (until);
CREATE TABLE IF NOT EXISTS revocations (
    number INTEGER PRIMARY KEY, peer_id TEXT NOT NULL UNIQUE, revoked_at REAL NOT NULL,
    until REAL NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A node that was admitted."""

    peer_id: PeerId
    role: Role
    stage: str | None
    address: str
    is_reached: bool  # Whether its key answered at the address when it last asked for a credential.
    device: str
    memory_bytes: int
    bandwidth_mbit: float
    version: str
    package_digest: str
    admitted_at: float
    seen_at: float
    expires_at: float
    is_revoked: bool


@dataclass(frozen=True, slots=True)
class InvitationLeft:
    """What is left of an invitation; ``name`` is the beginning of its hash."""

    name: str
    role: Role
    uses: int
    uses_left: int
    expires_at: float


class Register:
    """The file at ``path``, made if it is not there. May be used from any thread.

    Raises TrainerUsageError where it is of another run or no such file, TrainerError where it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise TrainerUsageError(f"--db {path}: expected the file of an authority, found {error}") from None
        self._fact("format", str(_FORMAT))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def bind(self, run_name: str) -> None:
        """Makes it the register of a run; raises TrainerUsageError where it is that of another."""
        self._fact("run", run_name)

    def _fact(self, name: str, value: str) -> None:
        with self._changing() as database:
            database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
            [(found,)] = database.execute("SELECT value FROM facts WHERE name = ?", (name,))
        if found != value:
            raise TrainerUsageError(f"--db {self._path}: expected {name} {value!r}, found {found!r}; name another file")

    # -- what an operator does -----------------------------------------------------------------------------------------

    def invite(self, token_key: str, role: Role, uses: int, now: float, life_s: float) -> None:
        """Lets ``uses`` nodes join by an invitation, of which ``token_key`` is the public key."""
        with self._changing() as database:
            database.execute(
                "INSERT INTO invitations VALUES (?, ?, ?, ?, ?, ?)",
                (token_hash(token_key), role, uses, uses, now, now + life_s),
            )

    def withdraw(self, name: str, now: float) -> InvitationLeft:
        """Ends an invitation for whoever has not joined by it yet; members by it stay. Returns it as it was.

        ``name`` is the beginning of its hash, 8 digits or more. Raises TrainerUsageError: none is so named, or several.
        """
        query = (
            "SELECT hash, role, uses, uses_left, expires_at FROM invitations WHERE substr(hash, 1, ?) = ? "
            "ORDER BY created_at LIMIT 2"
        )
        with self._changing() as database:
            found = database.execute(query, (len(name), name)).fetchall()
            if len(found) != 1:
                raise TrainerUsageError(
                    f"invitation {name}: expected the name of one, as 'authority invitations' prints it, found "
                    f"{'several' if found else 'none'}"
                )
            [(full, *rest)] = found
            database.execute(
                "UPDATE invitations SET uses_left = 0, expires_at = min(expires_at, ?) WHERE hash = ?", (now, full)
            )
        return InvitationLeft(full[:_NAME_DIGITS], *rest)

    def allow(self, peer_id: PeerId, role: Role) -> None:
        """Lets a node join without an invitation."""
        with self._changing() as database:
            database.execute("INSERT OR REPLACE INTO allowed VALUES (?, ?)", (peer_id, role))

    def revoke(self, peer_id: PeerId, now: float, life_s: float) -> int:
        """Takes a peer out for good, one that was never admitted too; returns the number of the list it is in first.

        ``life_s`` is the life of a credential: none that was signed elsewhere meanwhile lives longer.
        """
        with self._changing() as database:
            known = database.execute("SELECT number FROM revocations WHERE peer_id = ?", (peer_id,)).fetchone()
            if known is not None:
                return int(known[0])
            [(in_force,)] = database.execute("SELECT count(*) FROM revocations WHERE until > ?", (now,))
            if in_force >= MAX_REVOKED:
                raise TrainerError(f"expected at most {MAX_REVOKED} revoked peers at a time, found as many; try later")
            found = database.execute("SELECT expires_at FROM members WHERE peer_id = ?", (peer_id,)).fetchone()
            until = max(now + life_s, found[0] if found else 0.0) + MAX_CLOCK_SKEW_S
            [(last,)] = database.execute("SELECT coalesce(max(number), 0) FROM revocations")
            # Later numbers are higher, even where this is a copy of the file that lacks the newest.
            number = max(int(last) + 1, int(now * 1000))
            database.execute("INSERT INTO revocations VALUES (?, ?, ?, ?)", (number, peer_id, now, until))
            return number

    def revoked(self, now: float) -> tuple[int, tuple[PeerId, ...]]:
        """Returns the number of the newest list, 0 if there is none, and the peers that are in it now."""
        with self._reading() as database:
            [(number,)] = database.execute("SELECT coalesce(max(number), 0) FROM revocations")
            peers = database.execute("SELECT peer_id FROM revocations WHERE until > ?", (now,)).fetchall()
        return number, tuple(peer_id for (peer_id,) in peers)

    def revoked_number(self) -> int:
        """Returns the number of the newest list."""
        with self._reading() as database:
            [(number,)] = database.execute("SELECT coalesce(max(number), 0) FROM revocations")
        return int(number)

    def member_key(self, beginning: str) -> PeerId:
        """Returns the key of the member whose key begins so. Raises TrainerUsageError: none does, or several do."""
        query = "SELECT peer_id FROM members WHERE substr(peer_id, 1, ?) = ? LIMIT 2"
        with self._reading() as database:
            found = database.execute(query, (len(beginning), beginning)).fetchall()
        if len(found) != 1:
            raise TrainerUsageError(
                f"peer {beginning}: expected the beginning of one member's key, as 'authority list' prints it, found "
                f"{'several' if found else 'none'}"
            )
        return str(found[0][0])

    def members(self) -> tuple[Member, ...]:
        """Returns all members, those longest admitted first."""
        query = (
            "SELECT m.peer_id, role, stage, address, is_reached, device, memory_bytes, bandwidth_mbit, version, "
            "package_digest, admitted_at, seen_at, expires_at, r.number IS NOT NULL FROM members m "
            "LEFT JOIN revocations r ON r.peer_id = m.peer_id ORDER BY admitted_at, m.peer_id"
        )
        with self._reading() as database:
            rows = database.execute(query).fetchall()
        names = [field.name for field in fields(Member)]
        found: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
        flags = ("is_reached", "is_revoked")
        return tuple(Member(**(each | {name: bool(each[name]) for name in flags})) for each in found)

    def invitations(self) -> tuple[InvitationLeft, ...]:
        """Returns all invitations, oldest first."""
        query = "SELECT substr(hash, 1, ?), role, uses, uses_left, expires_at FROM invitations ORDER BY created_at"
        with self._reading() as database:
            return tuple(InvitationLeft(*row) for row in database.execute(query, (_NAME_DIGITS,)).fetchall())

    # -- what a node asks for ------------------------------------------------------------------------------------------

    def check_in(self, peer_id: PeerId, stage: str, sent_at: float, now: float) -> None:
        """Notes that a member is there; raises RefusedError where it is none, or says what it has said before."""
        with self._reading() as database:
            self._check_not_revoked(database, peer_id)
            query = "SELECT seen_at, checked_at, stage FROM members WHERE peer_id = ?"
            found = database.execute(query, (peer_id,)).fetchone()
        if found is None:
            raise RefusedError("unknown", f"expected a member of the run, found {peer_id[:16]}…, who has to join first")
        seen_at, checked_at, known_stage = found
        if sent_at <= checked_at:
            raise RefusedError(Reason.REPLAYED, "expected a new check-in, found one that came before")
        if now - seen_at >= _SEEN_EVERY_S or (stage and stage != known_stage):
            with self._changing() as database:
                database.execute(
                    "UPDATE members SET seen_at = ?, checked_at = ?, stage = coalesce(nullif(?, ''), stage) "
                    "WHERE peer_id = ?",
                    (now, sent_at, stage, peer_id),
                )

    def check_member(self, peer_id: PeerId, role: Role, now: float) -> None:
        """Raises RefusedError where a peer is no member in that role, or was revoked, or its credential has expired."""
        with self._reading() as database:
            self._check_not_revoked(database, peer_id)
            found = database.execute("SELECT role, expires_at FROM members WHERE peer_id = ?", (peer_id,)).fetchone()
        if found is None:
            raise RefusedError("unknown", f"expected a member of the run, found {peer_id[:16]}…, who has to join first")
        if found[0] != role:
            raise RefusedError("role", f"expected role {role}, found {found[0]}")
        if found[1] <= now:
            raise RefusedError("unknown", "expected a member with a valid credential, found one that has expired")

    def begin_join(self, request: JoinRequest, now: float) -> bool:
        """Checks that a request is new and its sender may join, and notes the nonce; returns whether it is a member.

        Raises RefusedError: ``revoked``, ``replayed``, ``token``, or ``role``.
        """
        with self._changing() as database:
            self._check_not_revoked(database, request.peer_id)
            if database.execute("SELECT 1 FROM nonces WHERE nonce = ?", (request.nonce,)).fetchone():
                raise RefusedError(Reason.REPLAYED, "expected a new request, found one that came before")
            is_member = self._right_to_join(database, request, now) == "member"
            database.execute("DELETE FROM nonces WHERE until <= ?", (now,))
            until = request.sent_at + 2 * MAX_CLOCK_SKEW_S
            database.execute("INSERT INTO nonces VALUES (?, ?)", (request.nonce, until))
        return is_member

    def admit(
        self, request: JoinRequest, stages: Sequence[str], *, is_reached: bool, now: float, expires_at: float
    ) -> str | None:
        """Makes the sender a member, counts a use of its invitation, and returns its stage; None: it has none.

        Raises RefusedError as `begin_join` does, if something has changed meanwhile, and ``stage``.
        """
        with self._changing() as database:
            self._check_not_revoked(database, request.peer_id)
            right = self._right_to_join(database, request, now)
            if right not in ("member", "allowed"):
                used = database.execute(
                    "UPDATE invitations SET uses_left = uses_left - 1 WHERE hash = ? AND uses_left > 0", (right,)
                )
                if used.rowcount != 1:
                    raise RefusedError("token", "expected an invitation with uses left, found none left")
            stage = self._stage_for(database, request, stages, now)
            database.execute(
                "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?) ON CONFLICT (peer_id) DO "
                "UPDATE SET role = excluded.role, stage = excluded.stage, address = excluded.address, "
                "is_reached = excluded.is_reached, device = excluded.device, memory_bytes = excluded.memory_bytes, "
                "bandwidth_mbit = excluded.bandwidth_mbit, version = excluded.version, "
                "package_digest = excluded.package_digest, seen_at = excluded.seen_at, "
                "expires_at = excluded.expires_at",
                (
                    *(request.peer_id, request.role, stage, request.address, int(is_reached), request.device),
                    *(request.memory_bytes, request.bandwidth_mbit, request.version, request.package_digest),
                    *(right, now, now, expires_at),
                ),
            )
        return stage

    def _check_not_revoked(self, database: sqlite3.Connection, peer_id: PeerId) -> None:
        if database.execute("SELECT 1 FROM revocations WHERE peer_id = ?", (peer_id,)).fetchone():
            raise RefusedError(Reason.REVOKED, f"the run's authority has revoked {peer_id[:16]}…")

    def _right_to_join(self, database: sqlite3.Connection, request: JoinRequest, now: float) -> str:
        """Returns by what the sender may join: ``member``, ``allowed``, or the hash of an invitation."""
        found = database.execute("SELECT role FROM members WHERE peer_id = ?", (request.peer_id,)).fetchone()
        if found is not None and found[0] == request.role:
            return "member"
        listed = database.execute("SELECT role FROM allowed WHERE peer_id = ?", (request.peer_id,)).fetchone()
        if listed is not None and listed[0] == request.role:
            return "allowed"
        if not request.token_key:
            listed_role = (listed or found or (None,))[0]
            if listed_role is not None:
                raise RefusedError("role", f"expected role {listed_role}, found {request.role}")
            raise RefusedError(
                "token", "expected an invitation (--token), found none; ask whoever runs this run for one"
            )
        query = "SELECT hash, role, uses_left, expires_at FROM invitations WHERE hash = ?"
        invitation = database.execute(query, (token_hash(request.token_key),)).fetchone()
        if invitation is None:
            raise RefusedError("token", "expected an invitation of this authority, found another")
        right, role, uses_left, expires_at = invitation
        if expires_at <= now:
            raise RefusedError(
                "token",
                f"expected an invitation that is valid, found one that ended {now - expires_at:.0f} s ago: it expired "
                "or was withdrawn; ask whoever runs this run for another",
            )
        if role != request.role:
            raise RefusedError("role", f"expected role {role}, as the invitation says, found {request.role}")
        if uses_left <= 0:
            raise RefusedError("token", "expected an invitation with uses left, found none left")
        return str(right)

    def _stage_for(
        self, database: sqlite3.Connection, request: JoinRequest, stages: Sequence[str], now: float
    ) -> str | None:
        if request.role != "worker" or not stages:
            return request.stage if request.stage not in ("", "auto") else None
        if request.stage not in ("", "auto"):
            if request.stage not in stages:
                raise RefusedError("stage", f"expected one of {', '.join(stages)}, found {request.stage}")
            return request.stage
        query = (
            "SELECT stage, count(*) FROM members WHERE role = 'worker' AND stage IS NOT NULL AND seen_at > ? "
            "AND peer_id != ? AND peer_id NOT IN (SELECT peer_id FROM revocations) GROUP BY stage"
        )
        replicas = dict(database.execute(query, (now - THERE_S, request.peer_id)).fetchall())
        return stage_by_need(stages, replicas, request.peer_id)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors_mapped():
            yield self._connection

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; it is undone where the block raises."""
        with self._lock, self._errors_mapped():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise

    @contextmanager
    def _errors_mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise TrainerError(f"{self._path}: cannot be read or written now: {error}") from error


def opened(path: Path) -> closing[Register]:
    """Opens a register for a ``with`` block."""
    return closing(Register(path))


def as_row(found: Member, now: float) -> dict[str, Any]:
    """Returns a member as `authority list --json` shows it; ages and times left in seconds."""
    return {
        "peer_id": found.peer_id,
        "role": found.role,
        "stage": found.stage,
        "address": found.address,
        "is_reached": found.is_reached,
        "is_there": now - found.seen_at <= THERE_S and not found.is_revoked,
        "is_revoked": found.is_revoked,
        "seen_s_ago": round(now - found.seen_at, 1),
        "valid_s": round(found.expires_at - now, 1),
        "device": found.device,
        "memory_bytes": found.memory_bytes,
        "bandwidth_mbit": found.bandwidth_mbit,
        "version": found.version,
        "package_digest": found.package_digest,
    }
