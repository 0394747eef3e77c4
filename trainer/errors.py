"""Everything that can go wrong in training, one line a user can act on each."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of all of them; the message says what was expected, what was found, and what to do."""


class TrainerUsageError(TrainerError):
    """Options that do not go together, or a value out of range."""


class RunFileError(TrainerUsageError):
    """A signed run file, or a change of a run, cannot be read, believed or used."""


class NonFiniteTrainingError(TrainerError):
    """Loss or gradient stayed NaN or infinite for too many steps in a row."""


class UnfitNodeError(TrainerError):
    """A node has taken itself out too often in a row: the others' state does not mend what is wrong with it."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or used."""


class CorruptCheckpointError(CheckpointError):
    """Of a checkpoint and those kept before it, none is whole."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another run, another architecture, or a format this release does not read."""


class ExportError(TrainerError):
    """A checkpoint cannot be written in another project's form."""


class CodecError(TrainerError):
    """Encoded numbers that no honest encoder made, or numbers that cannot be encoded."""


class RpcError(TrainerError):
    """Talking to a peer failed."""


class PeerUnavailableError(RpcError):
    """A peer cannot be reached, fell silent, or did not answer in time.

    ``cause`` says which, where connecting to its address has failed: ``refused``, ``timeout``, ``no_route``, ``name``
    (no such host), ``tls`` (something else listens there); empty: not known, or a failure behind that.
    """

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


class RefusedError(RpcError):
    """A peer answered no: one word for programs and counters (``replayed``, ``protocol``, ...), one line for people."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class MalformedAnswerError(RpcError):
    """A peer answered something that is no answer to what was asked."""


class PipelineError(TrainerError):
    """A micro-batch cannot be taken through a stage; what it was to change is as it was."""


class NonFiniteActivationError(PipelineError):
    """An activation, loss or gradient of a micro-batch is not finite; nothing of it was counted."""


class StaleGradientError(PipelineError):
    """The weights have taken too many steps since the forward pass that a gradient belongs to."""


class BasisError(TrainerError):
    """A subspace's basis is not the run's, or its columns are not orthonormal."""


class LedgerError(TrainerError):
    """The account of which data were trained on cannot be kept, or what it says cannot be believed."""


class JournalLostError(LedgerError):
    """Another driver keeps the account by now; nothing of this one's is added to the journal any more."""


class IncompatiblePeerError(TrainerError):
    """The other nodes of the run train another architecture or vocabulary, or speak another protocol."""


class RoundFailedError(TrainerError):
    """A round ended without a result; nothing was applied, and training goes on from where it was."""


class RoundLeftError(RoundFailedError):
    """This node is to stop and has left a round before its end, as it may: nothing has gone wrong."""


class StateBehindError(RoundFailedError):
    """The other members hold another state than this node; it has to fetch theirs before it can take part."""


class StateTransferError(TrainerError):
    """No donor, or no set of donors, gave the whole state."""


class AdmissionError(TrainerError):
    """The run's authority does not answer and this node has no valid credential, or it was revoked."""


class AdmissionRefusedError(TrainerUsageError):
    """The run's authority refuses this node, which trying again does not change; ``reason`` is its one word."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class DiscoveryError(TrainerError):
    """Peers cannot be looked up or announced to."""
