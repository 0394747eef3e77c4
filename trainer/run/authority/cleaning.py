"""Removes old rounds and snapshots from a run's bucket, where its members have no credentials to do so.

Beside the authority that signs their requests, in a thread of its own: every minute it looks which round is the newest
that counts, and removes what a member would (`trainer.bucket_rounds.keeping`). Members wait for nothing of it, so it
may fail, or be done by two processes at once. It judges by the run's description in the bucket, which all members
compare with their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from genesis.errors import GenesisError
from trainer.aggregation import RuleConfig
from trainer.bucket_rounds.forms import DenseForm
from trainer.bucket_rounds.history import refusal_by
from trainer.bucket_rounds.keeping import Keeping
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.compression.vectors import codec_named
from trainer.errors import TrainerError
from trainer.network.rpc import Identity
from trainer.network.rpc.admission import Admission
from trainer.run.authority.addresses import BucketAddresses, described_in

logger = logging.getLogger(__name__)

CLEAN_EVERY_S: Final = 60.0


@contextmanager
def cleaning(
    bucket: BucketAddresses, run_name: str, identity: Identity, every_s: float = CLEAN_EVERY_S
) -> Iterator[None]:
    """Removes what is old while the block runs."""
    ended = threading.Event()

    def clean() -> None:
        keeping: Keeping | None = None
        while not ended.wait(every_s):
            try:
                keeping = keeping or keeping_of(bucket.place, run_name, identity)
                newest = None if keeping is None else keeping.history.newest()
                if keeping is not None and newest is not None:
                    keeping.clean(newest.round_index)
            except (GenesisError, TrainerError) as error:
                logger.warning("old rounds stay in the bucket for now: %s", error)
            except Exception:
                # Nothing that lies in a bucket may end this thread.
                logger.exception("removing old rounds")

    thread = threading.Thread(target=clean, name="bucket-cleaning", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10.0)


def keeping_of(place: Place, run_name: str, identity: Identity) -> Keeping | None:
    """Returns what keeps the bucket of a run in order; None: no member has described the run in it yet."""
    found = described_in(place, run_name)
    if found is None:
        return None
    rules, config = found
    settings = BucketSettings(
        identity=identity,
        place=place,
        rules=rules,
        rule=RuleConfig(),
        config=config,
        form_of=lambda num_values: DenseForm(codec_named("fp32"), num_values),
        round_timeout_s=60.0,
        invite_after_s=60.0,
        refusal=refusal_by(rules.members, Admission(run_name, (identity.peer_id,))),
    )
    return Keeping(settings, StoreClock())
