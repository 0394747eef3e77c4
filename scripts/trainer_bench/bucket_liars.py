"""What liars cost a run whose rounds go through a bucket: held-out loss over that of as many honest members.

Members train in threads, as in `liars`, but their rounds are real ones through a folder: contributions, agreements,
records, snapshots. A liar does all of this at once: its contribution is a lie of great weight; before each round it
puts an agreement for itself alone; it says that it holds another state, and stores a false snapshot of that. A newcomer
then takes up the newest state that it believes.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from scripts.trainer_bench.crew import load_average, progress
from scripts.trainer_bench.liars import LIES, Setting, held_out_loss, member_loop, tiny_model
from trainer.aggregation import RuleConfig
from trainer.bucket_rounds.collective import BucketCollective
from trainer.bucket_rounds.config import BucketConfig
from trainer.bucket_rounds.documents import AgreedMember, Agreement, Claims, StateRecord
from trainer.bucket_rounds.forms import DenseForm
from trainer.bucket_rounds.keeping import Keeping
from trainer.bucket_rounds.object_names import agreement_key, state_key
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.rules import RoundRules, weights_of
from trainer.bucket_rounds.settings import BucketSettings
from trainer.bucket_rounds.snapshots import fetch_snapshot, put_snapshot
from trainer.compression.vectors import codec_named
from trainer.errors import NonFiniteTrainingError
from trainer.network.rpc import Identity
from trainer.network.transfer import Expectation
from trainer.network.transfer.snapshot import describe_chunks
from trainer.outer.diloco.flat import FlatLayout, synchronised_parameters
from trainer.outer.diloco.outer import OuterOptimizer
from trainer.outer.engine.collective import Contribution

GROUPS: Final = ((4, 1), (7, 2))
ASKED: Final = 1.05
_RUN_ID: Final = "liars"
_CLAIMED: Final = 10_000  # Batches, by a liar.
_GATHER_S: Final = 60.0
_MEMBER_S: Final = 3600.0


def bench_bucket_liars(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ratios of both groups, for each lie in a contribution; the other lies are told beside each of them."""
    torch.set_num_threads(1)
    logging.getLogger("trainer.bucket_rounds").setLevel(logging.ERROR)  # Of void agreements there are many.
    setting = Setting(num_rounds=arguments.liar_rounds)
    report: dict[str, Any] = {"load": [load_average()], "ratios": {}}
    for num_members, num_liars in GROUPS:
        honest, _ = trained(num_members, 0, "", setting)
        for lie in arguments.bucket_lies:
            loss, newcomer = trained(num_members, num_liars, lie, setting)
            found = {"ratio": loss / honest, "newcomer": newcomer}
            report["ratios"][f"{num_liars} of {num_members}, {lie}"] = found
            progress(f"{num_liars} of {num_members}, {lie}: {found['ratio']:.4f} of honest {honest:.4f}")
            print(
                f"  {num_liars} of {num_members} liars ({lie}, agreements, snapshots): held-out loss {loss:.4f}, "
                f"{loss / honest:.4f} of {honest:.4f} of the honest run (asked: at most {ASKED}); a newcomer takes up "
                f"{newcomer} state",
                flush=True,
            )
    report["load"].append(load_average())
    print(f"  {' to '.join(report['load'])}", flush=True)
    return report


def trained(num_members: int, num_liars: int, lie: str, setting: Setting) -> tuple[float, str]:
    """Trains a run; returns its held-out loss, and whether a newcomer takes up ``the right``, ``A FALSE`` or ``no``."""
    with tempfile.TemporaryDirectory(prefix="genesis-bucket-liars-") as folder, without_switches():
        members = [
            _Member(number, _settings(Path(folder), num_members), setting, lie if number < num_liars else "")
            for number in range(num_members)
        ]
        calls = [_started(member.train) for member in members]
        for call in calls:
            call.result(_MEMBER_S)
        honest = [member for member in members if not member.lie]
        digests = {member.digest() for member in honest}
        if len(digests) != 1:
            raise RuntimeError(f"expected honest members that end alike, found {len(digests)} states")
        newcomer = _newcomers_anchor(_settings(Path(folder), num_members))
        is_right = newcomer is not None and any(torch.equal(newcomer, each) for each in honest[0].anchors)
        taken = "no" if newcomer is None else "the right" if is_right else "A FALSE"
        model = tiny_model(setting)
        honest[0].layout.scatter(honest[0].anchor, synchronised_parameters(model))
        return held_out_loss(model), taken


@contextmanager
def without_switches() -> Iterator[None]:
    """Keeps torch at one thread in every thread for as long as the block lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settings(folder: Path, num_members: int) -> BucketSettings:
    from genesis.store.folder import FolderStore

    config = BucketConfig(
        url=str(folder), poll_interval_s=0.2, watch_interval_s=3600.0, propose_after_s=1.0, snapshot_rounds=1
    )
    return BucketSettings(
        identity=Identity.create(),
        place=Place(FolderStore(folder), "none"),
        rules=RoundRules(run_id=_RUN_ID, quorum=num_members, gather_timeout_s=_GATHER_S, propose_after_s=1.0),
        rule=RuleConfig(),
        config=config,
        form_of=lambda num_values: DenseForm(codec_named("fp32"), num_values, num_threads=1),
        round_timeout_s=_MEMBER_S,
        invite_after_s=_MEMBER_S,
    )


class _Member:
    """One member's training and rounds; with a ``lie``, a liar's."""

    def __init__(self, number: int, settings: BucketSettings, setting: Setting, lie: str) -> None:
        self.lie = lie
        self._setting = setting
        self._settings = settings
        model = tiny_model(setting)
        self._loop = member_loop(model, number, setting)
        self._parameters = synchronised_parameters(model)
        self.layout = FlatLayout.of(self._parameters)
        self.anchor = self.layout.gather(self._parameters)
        self.anchors: list[Tensor] = []
        self._momentum, self._reference = torch.zeros_like(self.anchor), torch.zeros_like(self.anchor)
        self._generator = torch.Generator().manual_seed(77 + number)
        self._agreements: list[Agreement] = []
        self._collective = BucketCollective(self._settings, self._is_due, self._agreements.append)
        self._keeping = Keeping(self._settings, self._collective.clock)

    def digest(self) -> str:
        """Of the state this member holds."""
        return hashlib.sha256(self.anchor.numpy().tobytes()).hexdigest()

    def train(self) -> None:
        """Trains and takes part in all rounds."""
        torch.set_num_threads(1)
        for round_index in range(self._setting.num_rounds):
            self.layout.scatter(self.anchor, self._parameters)
            try:
                for _ in range(self._setting.inner_steps):
                    self._loop.step()
            except NonFiniteTrainingError:
                if not self.lie:
                    raise
            own = self.anchor - self.layout.gather(self._parameters)
            if self.lie:
                self._put_false_agreement(round_index)
            result = self._collective.reduce(self._contribution(round_index, own))
            self.anchor, self._momentum = OuterOptimizer().stepped(self.anchor, self._momentum, result.vector, 1.0)
            self._reference = result.vector
            self.anchors.append(self.anchor)
            if self.lie:
                self._put_false_state()
            else:
                self._keeping.record(self._agreements[-1], self.digest(), self._packed)
                self._keeping.remove_old(self._agreements[-1])
        self._collective.close()

    def _contribution(self, round_index: int, own: Tensor) -> Contribution:
        vector = LIES[self.lie](own, self._generator) if self.lie else own
        if not bool(torch.isfinite(vector).all()):
            vector = torch.full_like(own, 1e30)  # What an encoder lets through.
        return Contribution(
            round_index=round_index,
            vector=vector,
            num_batches=_CLAIMED if self.lie else self._setting.inner_steps,
            age_s=0.0,
            reference=self._reference,
            state_digest=self.digest(),
        )

    def _packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"round_index": self._agreements[-1].round_index}, {"anchor": self.anchor}

    def _is_due(self, round_index: int) -> bool:
        return self._keeping.is_snapshot_due(round_index)

    def _put_false_agreement(self, round_index: int) -> None:
        """An agreement for itself alone, put before the round could close; where there is none yet."""
        settings = self._settings
        claims = Claims(num_batches=_CLAIMED, age_s=0.0, progress=1.0, vocabulary_rows=0)
        weight = weights_of([claims], settings.rules)[0]
        entry = AgreedMember(member=settings.own_id, payload_sha256="a" * 64, claims=claims, weight=3.0 * weight)
        agreement = Agreement(
            run_id=_RUN_ID,
            member=settings.own_id,
            round_index=round_index,
            attempt=0,
            follows=self._agreements[-1].digest if self._agreements else "",
            state_digest=self.digest(),
            form="dense-fp32",
            num_values=self.anchor.numel(),
            members=(entry,),
            has_snapshot=True,
        ).signed(settings.identity)
        settings.place.put_once(agreement_key(round_index, 0), agreement.wire())

    def _put_false_state(self) -> None:
        """A record of another state, and a snapshot of that."""
        settings, agreement = self._settings, self._agreements[-1]
        false = {"anchor": torch.full_like(self.anchor, 7.0)}
        descriptor, pages = describe_chunks({"round_index": agreement.round_index}, false)
        record = StateRecord(
            run_id=_RUN_ID,
            member=settings.own_id,
            round_index=agreement.round_index,
            agreement=agreement.digest,
            state_digest="e" * 64,
            snapshot=descriptor.digest,
        ).signed(settings.identity)
        settings.place.put_once(state_key(agreement.round_index, settings.own_id), record.wire())
        put_snapshot(settings.place, agreement.round_index, descriptor, pages, false)


def _newcomers_anchor(settings: BucketSettings) -> Tensor | None:
    """Returns the newest state that a newcomer believes; None: it finds none."""
    member = Keeping(settings, BucketCollective(settings).clock)
    newest = member.history.newest()
    found = {} if newest is None else member.snapshots(newest.round_index)
    for round_index, digest in found.items():
        with tempfile.TemporaryDirectory(prefix="genesis-newcomer-") as state:
            snapshot = fetch_snapshot(
                settings.place, round_index, digest, Path(state), lambda _: Expectation(max_bytes=1 << 30)
            )
            return snapshot.tensors["anchor"].clone()
    return None


def _started(call: Any) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)

    threading.Thread(target=run, name="member", daemon=True).start()
    return future


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    parser.add_argument(
        "--bucket-lies", nargs="+", choices=LIES, default=["x -10", "sign flipped"], help="for bucket-liars"
    )
