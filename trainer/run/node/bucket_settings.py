"""From a node's options to what its rounds through a bucket have in common, and to what `run.json` names of that.

Nothing is contacted here: what the options contradict is found before the bucket is. The trade-off: whether the bucket
honours conditions, and whether the run in it is this one, is only known once `BucketNetwork.start` has asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Final

from pydantic import JsonValue

from genesis.errors import GenesisError
from genesis.store.base import ReadableStore, Store
from genesis.store.limits import RetryPolicy
from genesis.store.opening import open_readable, open_store
from trainer.bucket_rounds.forms import DenseForm, Form, SparseForm
from trainer.bucket_rounds.history import refusal_by
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.reducers import SlicedForm
from trainer.bucket_rounds.rules import RoundRules
from trainer.bucket_rounds.settings import BucketSettings
from trainer.compression.vectors import codec_named
from trainer.errors import TrainerUsageError
from trainer.network.rpc import Identity
from trainer.run.config import RunConfig
from trainer.run.node.admission import AdmissionClient
from trainer.run.node.loop_thread import LoopThread
from trainer.run.node.ports import require_rounds_folder
from trainer.run.node.signed_bucket import open_signed_bucket

_CDN_S: Final = 10.0
"""For a CDN to answer in, after which the bucket is asked; what comes slowly has longer, by its size."""


def described(settings: BucketSettings) -> dict[str, JsonValue]:
    """Returns what a run's description says of its rounds, which all nodes have alike.

    What is to be kept of rounds it says where the run's authority removes them, which knows no other options. Nodes of
    earlier releases know neither that nor slices, and are in no such run.
    """
    bucket = settings.config
    kept = {"snapshot_rounds": bucket.snapshot_rounds, "keep_rounds": bucket.keep_rounds}
    return {
        **asdict(settings.rules),
        "members": list(settings.rules.members),
        **({"num_slices": bucket.num_slices} if bucket.num_slices else {}),
        **(kept if bucket.access == "signed" else {}),
    }


def settings_of(
    config: RunConfig,
    identity: Identity,
    vocabulary_rows: Callable[[], int],
    stopping: Callable[[], bool],
    admission: AdmissionClient | None = None,
    loop: LoopThread | None = None,
) -> BucketSettings:
    """Returns what all rounds of a node have in common; nothing is contacted. Raises TrainerUsageError."""
    options, bucket = config.round_options, config.bucket
    store = _opened(config, admission, loop)
    overlaps = config.outer.overlap_steps > 0
    return BucketSettings(
        identity=identity,
        place=Place(store, bucket.price_list, _cdn_of(bucket.cdn)),
        rules=RoundRules(
            run_id=config.run_id,
            members=tuple(sorted(bucket.members)),
            min_members=options.min_members,
            max_members=bucket.max_members,
            quorum=bucket.quorum,
            gather_timeout_s=options.gather_timeout_s,
            few_members_after_s=bucket.few_members_after_s,
            propose_after_s=bucket.propose_after_s,
            max_weight_ratio=options.max_weight_ratio,
        ),
        rule=config.rule,
        config=bucket,
        form_of=_form_of(config),
        round_timeout_s=options.round_timeout_s,
        invite_after_s=options.invite_after_s,
        refusal=refusal_by(bucket.members, None if admission is None else admission.admission),
        credential=lambda: None if admission is None else admission.admission.own,
        is_unwelcome=lambda member: admission is not None and admission.admission.is_revoked(member),
        vocabulary_rows=vocabulary_rows,
        carried_share=1.0 - config.outer.merge_alpha if overlaps else 1.0,
        stopping=stopping,
        removes=bucket.access == "own",
    )


def _opened(config: RunConfig, admission: AdmissionClient | None, loop: LoopThread | None) -> Store:
    """Returns the bucket, with this node's credentials or by addresses that the run's authority signs."""
    try:
        if config.bucket.access == "signed" and admission is not None and loop is not None:
            return open_signed_bucket(config, admission, loop)
        require_rounds_folder(config)  # Else tried for minutes.
        return open_store(config.bucket.url, policy=RetryPolicy())
    except GenesisError as error:
        raise TrainerUsageError(f"--rounds: {error}") from None


def _cdn_of(url: str) -> ReadableStore | None:
    """Returns what serves the bucket's objects to whoever reads; it gets little time, since the bucket has them too."""
    try:
        return open_readable(url, policy=RetryPolicy().lasting(_CDN_S)) if url else None
    except GenesisError as error:
        raise TrainerUsageError(f"bucket.cdn: {error}") from None


def _form_of(config: RunConfig) -> Callable[[int], Form]:
    """Returns how vectors of some length travel in this run."""
    if config.strategy == "sparseloco":
        return partial(SparseForm, averaging=config.sparseloco.averaging)
    codec, num_slices = codec_named(config.round_options.compression), config.bucket.num_slices
    if num_slices:
        return lambda num_values: SlicedForm(DenseForm(codec, num_values), num_slices)
    return partial(DenseForm, codec)
