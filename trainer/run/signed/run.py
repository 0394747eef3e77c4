"""`SignedRun`: the run that a node belongs to, what is in force in it, and how changes reach it and its training.

The node trains by `config_by` of the round it is in; its rounds ask `number_at` and `options_at` of any round. All of
it follows from the run file and the chain of changes alone, so two nodes that know the same changes do the same, and
two that do not find out before they reduce: the agreement of a round names the newest change in force in it, by number
and digest.

    RUN/run.json, RUN/changes.jsonl      in ``runs`` of the folder of checkpoints, one for all nodes of a machine

A run has one file for good. A node that has trained by one refuses another of the same name there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from trainer.aggregation.config import RuleConfig
from trainer.collective.config import CollectiveConfig
from trainer.errors import RefusedError, RunFileError
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.exchange import RUN_METHOD
from trainer.network.discovery.record_exchange import RecordExchange
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Message, Peer, Reason, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.run.config import RunConfig
from trainer.run.signed.chain import ChangeChain, RunChange, with_settings
from trainer.run.signed.files import MAX_FILE_BYTES, RunFile, read_run_file, write_whole

if TYPE_CHECKING:
    from trainer.outer.diloco import DiLoCoTrainer
    from trainer.outer.diloco.rounds import AgreedChanges
    from trainer.outer.grad import GradTrainer

logger = logging.getLogger(__name__)

_FILE, _CHANGES = "run.json", "changes.jsonl"
_ANSWERS, _ANSWERS_PER_S = 128.0, 4.0
"""Questions of one address that are answered: at once, and per second. An answer may have 256 KiB."""


class RunQuestion(Message):
    """Asks a node for its run's file and how far it is."""


class RunAnswer(Message):
    """How far the node is; the run file, as canonical JSON, is the payload."""

    round_index: Annotated[int, Field(ge=-1, le=1 << 48)]
    """The round that it trains towards; -1: it has no rounds, or none yet."""
    newest_change: Annotated[int, Field(ge=0, le=1 << 31)]
    newest_digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Of that change; empty: there is none."""


class SignedRun:
    """One node's run; ``config`` is the node's own configuration, as it was before any change (a `RoundChanges`).

    Changes are added in the event loop of the exchange, and read by any thread.
    """

    def __init__(self, file: RunFile, chain: ChangeChain, config: RunConfig) -> None:
        self.file = file
        self.chain = chain
        self.round_index: Callable[[], int] = lambda: -1
        """Returns the round that this node trains towards, to tell whoever asks."""
        self._config = config
        self._made: dict[int, RunConfig] = {}
        self._trained_by = 0
        self._exchange: RecordExchange | None = None

    @classmethod
    def open(cls, config: RunConfig) -> Self | None:
        """Opens the run that a configuration is of, and the changes known on this disk; None: it is of none.

        Raises:
            RunFileError: the files on the disk are missing, changed, or of another run.
        """
        if not config.run_digest:
            return None
        folder = run_folder(config)
        file = kept_run_file(folder)
        if file is None or file.digest() != config.run_digest:
            raise RunFileError(
                f"run_digest: expected the run file {config.run_digest[:12]} in {folder}, found "
                f"{'none' if file is None else file.digest()[:12]}; start with --run and the run's file"
            )
        chain = ChangeChain(file, folder / _CHANGES)
        chain.load()
        return cls(file, chain, config)

    def config_by(self, number: int) -> RunConfig:
        """Returns this node's configuration after so many changes."""
        if number not in self._made:
            settings = self.chain.settings_by(number)
            self._made[number] = with_settings(self._config, settings) if settings else self._config
        return self._made[number]

    def outer_changes(self, begin_by: Callable[[int], None]) -> AgreedChanges:
        """Returns by which DiLoCo's outer steps go; for ``begin_by`` see `AgreedChanges`."""
        from trainer.outer.diloco.rounds import AgreedChanges  # It brings torch, which only nodes that train need.

        return AgreedChanges(lambda number: self.config_by(number).outer, begin_by)

    def authorities(self) -> frozenset[str]:
        """Returns the keys that may admit nodes now; a node without rounds goes by the newest change."""
        round_index = self.round_index()
        chain = self.chain
        return frozenset(chain.authorities_at(round_index) if round_index >= 0 else chain.newest_authorities())

    def begin_by(self, number: int) -> None:
        """Notes that what the node does from now on, it does by so many changes."""
        self._trained_by = number

    # -- see `trainer.collective.config.RoundChanges` ------------------------------------------------------------------

    def number_at(self, round_index: int) -> int:
        """Returns the number of the newest change in force in a round; 0: none."""
        return self.chain.number_at(round_index)

    def digest_of(self, number: int) -> str:
        """Returns the digest of a known change; empty for number 0."""
        return self.chain.digest_of(number)

    def options_at(self, round_index: int) -> tuple[RuleConfig, CollectiveConfig]:
        """Returns rule and options of rounds as they are in force in one."""
        config = self.config_by(self.number_at(round_index))
        return config.rule, config.round_options

    def trained_by(self) -> int:
        """Returns the number of the newest change that this node's work since its last round was done by."""
        return self._trained_by

    async def fetch(self, peer: Peer) -> None:
        """Takes up what a peer knows and this node does not."""
        if self._exchange is not None:
            await self._exchange.pull(peer)

    # -- among others --------------------------------------------------------------------------------------------------

    def connect(
        self, endpoint: Endpoint, peers: Callable[[], Sequence[Peer]], discovery: Discovery | None = None
    ) -> RecordExchange:
        """Answers questions about the run at an endpoint that is not started yet; returns what spreads its changes."""
        body = self.file.to_json()

        answers = TokenBuckets(_ANSWERS, _ANSWERS_PER_S)

        async def answer(request: Request[RunQuestion]) -> Reply[RunAnswer]:
            if not answers.take(request.remote_address):
                raise RefusedError(Reason.BUSY, "expected fewer questions for the run of this address; ask again later")
            changes = self.chain.changes
            digest = changes[-1].digest() if changes else ""
            return Reply(
                RunAnswer(round_index=self.round_index(), newest_change=len(changes), newest_digest=digest), body
            )

        endpoint.register(
            RUN_METHOD, RunQuestion, answer, any_recipient=True, needs_credential=False, max_payload_bytes=0
        )
        self._exchange = RecordExchange(endpoint, self.chain, peers, discovery)
        self._exchange.register()
        return self._exchange


class ChangesInForce:
    """Takes a node's training over to a run's changes, each when it comes in force; for the thread that trains.

    A change is in force from a round on, so without rounds there is none to go by. While a round goes on in the
    background nobody goes over: its members decide by which change it ends, and tell by way of the strategy.

    Args:
        run: the run.
        round_index: returns the round that the node trains towards; None: its strategy has no rounds.
        diloco: returns what makes rounds under DiLoCo or SparseLoCo; None under other strategies.
        gradients: returns what makes rounds of averaged gradients; None under other strategies.
        go_over: has all that trains go by these options from now on, which these changes have led to.
    """

    def __init__(
        self,
        run: SignedRun,
        round_index: Callable[[], int | None],
        diloco: Callable[[], DiLoCoTrainer | None],
        gradients: Callable[[], GradTrainer | None],
        go_over: Callable[[RunConfig, Sequence[RunChange]], None],
    ) -> None:
        self._run = run
        self._round_index = round_index
        self._diloco = diloco
        self._gradients = gradients
        self._go_over = go_over
        self._number = 0  # Of the newest change that the node goes by.

    def look(self) -> None:
        """Goes by the changes in force in the round that the node trains towards; between two steps or rounds."""
        diloco, gradients = self._diloco(), self._gradients()
        if diloco is not None:
            diloco.changes = self._run.outer_changes(self._go_by)
            if diloco.awaits_result:  # What is heard of meanwhile may be in force in this round or behind it.
                return
        if gradients is not None:
            gradients.go_by = self._go_by_round
        self._go_by_round(None)

    def _go_by_round(self, change: int | None) -> None:
        """Goes by a change that a round's members have agreed on; None: by those in force in the round to come."""
        round_index = self._round_index()
        if round_index is not None:
            self._go_by(self._run.number_at(round_index) if change is None else change)

    def _go_by(self, number: int) -> None:
        if number == self._number:
            return
        self._number = number
        self._run.begin_by(number)
        self._go_over(self._run.config_by(number), self._run.chain.changes[:number])


def run_folder(config: RunConfig) -> Path:
    """Returns the folder where the nodes of this machine keep what they know of a run."""
    return Path(config.checkpoint.directory).expanduser() / "runs" / config.run_id


def kept_run_file(folder: Path) -> RunFile | None:
    """Reads the run file that nodes here have begun with; None: none has. Raises `RunFileError`: it is damaged."""
    path = folder / _FILE
    try:
        if not path.exists():
            return None
        with path.open("rb") as file:
            body = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from error
    found = read_run_file(body, str(path))
    found.verify(str(path))
    return found


def keep_run(file: RunFile, changes: Sequence[bytes], config: RunConfig, where: str) -> None:
    """Keeps a run's file, and the changes that came with it, where `SignedRun.open` finds them.

    Raises:
        RunFileError: nodes here belong to another run of this name, or a change is not one of this run.
    """
    folder = run_folder(config)
    known = kept_run_file(folder)
    if known is None:
        write_whole(folder / _FILE, file.to_json())
    elif known.digest() != file.digest():
        raise RunFileError(
            f"{where}: expected the run file {known.digest()[:12]} that nodes here have trained by, found "
            f"{file.digest()[:12]} of the same name {file.name}; a run's file never changes: make changes by run set, "
            f"or move {folder} away to join another run"
        )
    chain = ChangeChain(file, folder / _CHANGES)
    chain.load()
    chain.add_all(changes, where)
