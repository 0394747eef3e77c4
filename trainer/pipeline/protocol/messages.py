"""What drivers and workers say to each other about a micro-batch; tensors travel beside the messages, see `tensors`.

| method            | asks                | tensors there           | tensors back                |
|-------------------|---------------------|-------------------------|-----------------------------|
| `stage/forward`   | :class:`ForwardAsk` | input (activation, ids) | output activation           |
| `stage/backward`  | :class:`BackwardAsk`| input, output's gradient| input's gradient (head: –)  |
| `stage/tail`      | :class:`TailAsk`    | input, labels           | input's gradient            |
| `stage/chain`     | :class:`ChainAsk`   | input, labels           | input's gradient (head: –)  |
| `stage/evaluate`  | :class:`EvaluateAsk`| input, labels (tail)    | output activation (tail: –) |
| with a gradient   |                     | output's gradient too   | input's gradient too        |
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from trainer.network.discovery.stage_report import Counted, Incarnation, StageName
from trainer.network.rpc.messages import Message
from trainer.pipeline.protocol.tensors import Parcel
from trainer.pipeline.protocol.work import MicroBatchKey

FORWARD, BACKWARD, TAIL, CHAIN = "stage/forward", "stage/backward", "stage/tail", "stage/chain"
EVALUATE, APPLIED, PROGRESS = "stage/evaluate", "stage/applied", "stage/progress"

Seconds: TypeAlias = Annotated[float, Field(ge=0, le=86_400)]


class StageAsk(Parcel):
    """The fields of every request about a micro-batch."""

    micro_batch: MicroBatchKey
    stage: StageName  # The stage it is meant for; a worker of another stage refuses it.
    num_rows: Annotated[int, Field(ge=1, le=4096)]
    num_positions: Annotated[int, Field(ge=1, le=2**20)]
    answer_within_s: Seconds  # From receipt: what is not begun by then is not needed, since nobody waits for it.


class ForwardAsk(StageAsk):
    """Runs the stage forward; changes nothing at the worker but its caches."""


class BackwardAsk(StageAsk):
    """Applies the gradient of a micro-batch whose forward pass may have been elsewhere."""

    apply_within_s: Seconds  # From receipt: later it must not be applied.
    forward_version: Counted  # Of the weights of its forward pass (`StageAnswer.version`).
    num_tokens: Counted  # Labels that count, over all rows: what its gradient is a sum over.


class TailAsk(StageAsk):
    """Computes loss and gradient, and applies the gradient."""

    apply_within_s: Seconds


class Hop(Message):
    """The next worker of a chain."""

    stage: StageName
    peer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    address: Annotated[str, Field(min_length=3, max_length=262)]
    certificate_pem: Annotated[str, Field(max_length=4096)] = ""


class ChainAsk(StageAsk):
    """Runs forward, has the next hops do the rest, and applies the gradient that comes back."""

    apply_within_s: Seconds
    route: Annotated[tuple[Hop, ...], Field(max_length=256)]
    """The stages after this one, the next first; empty at the tail."""
    driver: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """The driver, as named by a worker that passes the micro-batch on; empty: the caller."""


class EvaluateAsk(StageAsk):
    """Has the stage compute an input, to compare it with another worker's answer; nothing is counted or kept."""

    with_gradient: bool = False  # Body, tail: also answer with the gradient of the input, as to a request that counts.


class StageAnswer(Parcel):
    """The fields of every answer about a micro-batch."""

    incarnation: Incarnation
    version: Counted  # Optimizer steps that the weights had taken that computed it.
    num_rows: Counted
    applied: tuple[StageName, ...] = ()
    """Stages in which it is counted now, this one and those behind it; empty for a forward pass."""
    applied_number: Counted = 0
    shared_through: Counted = 0
    """The first so many of them are in a state that outlives the worker (committed with others, or on disk)."""
    loss_sum: float | None = None  # Tail: the sum of the losses of the labels that count.
    num_tokens: Counted = 0  # Tail: how many labels counted.
    scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the gradient was multiplied by: less than 1 where it was far larger than usual in the stage."""
    compute_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Time of the stage's own arithmetic, without queues and links; in a chain: this stage's alone."""
    queue_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0


class AppliedAsk(Message):
    """Asks which of these micro-batches are counted here."""

    micro_batches: Annotated[tuple[MicroBatchKey, ...], Field(max_length=1024)]
    refuse_from_now: bool = False  # Also refuse to apply those that are not, since another driver may get them now.


class CountedAs(Message):
    """How a worker acknowledged a micro-batch; see `StageAnswer` for the fields."""

    incarnation: Incarnation  # At the time it was counted: the worker may have restarted since.
    applied_number: Counted
    shared_through: Counted = 0


class AppliedAnswer(Message):
    """The micro-batches that are counted, and the process that says so."""

    incarnation: Incarnation
    micro_batches: Annotated[tuple[MicroBatchKey, ...], Field(max_length=1024)]
    counted_as: CountedAs | None = None  # Set where one micro-batch only was asked about, and that is counted.


class ProgressReport(Message):
    """How far a worker is with its stage's step; exchanged among the workers of a stage."""

    incarnation: Incarnation
    version: Counted
    num_tokens: Counted  # Accumulated towards the next step.
    joining: bool = False
