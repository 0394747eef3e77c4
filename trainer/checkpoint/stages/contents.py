"""The contents of a stage's checkpoint: which state of which stage it is, and all that its worker resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch import Tensor

from trainer.checkpoint.files import read_checkpoint, what_is_wrong
from trainer.checkpoint.stages.naming import StageName
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError, TrainerUsageError
from trainer.model import ModelConfig
from trainer.model.plan import StagePlan

_KIND: Final = "genesis-stage"
_FIELDS: Final = 1  # Version of the fields.
_PLAIN: Final = ("version", "num_tokens", "vocabulary", "basis", "incarnation", "applied")
_TREES: Final = ("parameters", "optimizer", "strategy", "accumulators")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The properties that all files of a set share; ``layers`` are the numbers of the cut, head first."""

    run_id: str
    config: ModelConfig
    layers: tuple[int, ...]
    vocabulary: str = ""  # Lineage of the vocabulary (`trainer.run.node.data.lineage_of`); empty if unknown.
    basis: str = ""  # Digest of the subspace's basis; empty without one.

    @property
    def plan(self) -> StagePlan:
        """Names and ranges of the stages."""
        return StagePlan.of(self.config, len(self.layers), self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHeader:
    """Identifies the state of a stage: when it was taken, in microseconds since 1970, and its steps and tokens."""

    shape: RunShape
    stage: str
    saved_us: int
    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """The state of a worker: tensors, and plain values that ``weights_only`` loads; others as in `RunShape`."""

    config: ModelConfig  # Of the whole model now: its vocabulary may have grown since the plan was made.
    version: int
    parameters: Mapping[str, Tensor]  # By their names in the whole model.
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """State of the strategy between a stage's workers: anchor, momentum, rounds."""
    accumulators: Mapping[str, Any] = field(default_factory=dict)
    """Gradients of micro-batches that no step has applied yet, and counts."""
    num_tokens: int = 0
    vocabulary: str = ""
    basis: str = ""
    incarnation: str = ""  # Incarnation of the worker that counted the micro-batches.
    applied: int = 0  # How many of the micro-batches it counted are applied.

    @classmethod
    def of_replica(
        cls,
        config: ModelConfig,
        replica: Mapping[str, Any],
        *,
        strategy: Mapping[str, Any] | None = None,
        num_tokens: int = 0,
        vocabulary: str = "",
        basis: str = "",
        incarnation: str = "",
        applied: int = 0,
    ) -> Self:
        """Splits `StageReplica.state_dict` into weights, optimizer, and what is accumulated and counted."""
        return cls(
            config=config,
            version=replica["stage_version"],
            parameters=replica["module"],
            optimizer=replica["optimizer"],
            accumulators={name: value for name, value in replica.items() if name not in ("module", "optimizer")},
            strategy=strategy or {},
            num_tokens=num_tokens,
            vocabulary=vocabulary,
            basis=basis,
            incarnation=incarnation,
            applied=applied,
        )

    def for_replica(self) -> dict[str, Any]:
        """The inverse, for `StageReplica.load_state_dict`."""
        return {**self.accumulators, "module": self.parameters, "optimizer": self.optimizer}


@dataclass(frozen=True, slots=True)
class StageCheckpoint:
    """A file's contents."""

    header: StageHeader
    state: StageState


def document_of(run_id: str, plan: StagePlan, stage: str, saved_us: int, state: StageState) -> dict[str, Any]:
    """The fields of a file by name; nothing is copied."""
    return {
        "kind": _KIND,
        "fields": _FIELDS,
        "run_id": run_id,
        "stage": stage,
        "saved_us": saved_us,
        "names": list(plan.names),
        "layers": [len(numbers) for numbers in plan.ranges],
        "architecture": state.config.to_dict(),
        **{name: getattr(state, name) for name in (*_PLAIN, *_TREES)},
    }


def peek(named: StageName) -> StageHeader:
    """Reads the header of a file; its tensors are mapped, not read, so the digest is not checked.

    Raises `CorruptCheckpointError`: it is unreadable, or does not match its name; `CheckpointMismatchError`: a later
    release wrote it.
    """
    _check_archive(named)
    try:
        document = torch.load(named.path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Damage causes any of a dozen internal errors of torch, depending on where it is.
        raise CorruptCheckpointError(
            f"{named.path}: damaged: not a whole checkpoint, but an archive whose contents cannot be read"
        ) from error
    return _header(named, document)


def read_stage(named: StageName) -> StageCheckpoint:
    """Reads a file and checks its digest; raises what `peek` does."""
    _check_archive(named)
    document = read_checkpoint(named.path)
    header = _header(named, document)
    try:
        parts = {name: _tree(document[name]) for name in _TREES}
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{named.path}: expected the parts of a stage's state, found {error}") from error
    shape = header.shape
    state = StageState(
        config=shape.config,
        version=header.version,
        num_tokens=header.num_tokens,
        vocabulary=shape.vocabulary,
        basis=shape.basis,
        incarnation=str(document.get("incarnation", "")),  # Older files lack both.
        applied=int(document.get("applied", 0)),
        **parts,
    )
    return StageCheckpoint(header, state)


def _check_archive(named: StageName) -> None:
    if wrong := what_is_wrong(named.path):
        raise CorruptCheckpointError(f"{named.path}: damaged: not a whole checkpoint, but {wrong}")


def _header(named: StageName, document: object) -> StageHeader:
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise CorruptCheckpointError(f"{named.path}: expected a stage's checkpoint, found a file of another kind")
    if document.get("fields") != _FIELDS:
        raise CheckpointMismatchError(
            f"{named.path}: expected a stage's checkpoint of version {_FIELDS}, found {document.get('fields')!r}; "
            "use the release that wrote it"
        )
    try:
        header = _parsed(document)
    except (KeyError, TypeError, ValueError, TrainerUsageError) as error:
        raise CorruptCheckpointError(
            f"{named.path}: expected run, stage, time and cut, found {type(error).__name__}: {error}"
        ) from error
    said = (header.stage, header.saved_us, header.shape.run_id)
    if said != (named.stage, named.saved_us, named.path.parent.parent.name):
        raise CorruptCheckpointError(
            f"{named.path}: expected the stage, time and run of its name, found {header.stage} of {header.shape.run_id}"
            f" at {header.saved_us}; give it back the name it was written under"
        )
    return header


def _parsed(document: Mapping[str, Any]) -> StageHeader:
    shape = RunShape(
        run_id=str(document["run_id"]),
        config=ModelConfig.from_dict(_tree(document["architecture"])),
        layers=tuple(int(count) for count in document["layers"]),
        vocabulary=str(document["vocabulary"]),
        basis=str(document["basis"]),
    )
    plan = shape.plan
    if list(plan.names) != document["names"]:
        raise ValueError(f"stages {document['names']}")
    plan.index(document["stage"])
    return StageHeader(
        shape=shape,
        stage=document["stage"],
        saved_us=int(document["saved_us"]),
        version=int(document["version"]),
        num_tokens=int(document["num_tokens"]),
    )


def _tree(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected names and values, found {type(value).__name__}")
    return value
