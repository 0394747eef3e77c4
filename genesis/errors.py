"""Everything that can go wrong in the populator, one line a user can act on each.

GenesisError
├── StoreError                     the object store could not do what was asked
│   ├── ObjectNotFoundError        no such object
│   ├── PreconditionFailedError    a conditional write or read found another object there
│   ├── StoreAccessError           no permission, wrong credentials, no such bucket, read-only
│   ├── StoreFullError             no space left
│   ├── StoreRemovedError          the store went away while it was written to
│   └── StoreUnavailableError      unreachable, or still failing after every retry
├── SourceError                    the input text
│   ├── UnknownSourceError         no source of that name
│   ├── InputNotFoundError         no file matches, or the repository does not exist
│   ├── MissingFieldError          no text where the source says; names the fields there are
│   ├── CorruptInputError          a truncated or damaged file; names file and position
│   └── InputChangedError          files already consumed are not what they were
├── TokenizerError                 the vocabulary
│   ├── VocabularyMismatchError    one vocabulary does not extend another
│   └── InvalidTextError           a string that is not valid Unicode, or ids outside the vocabulary
├── LeaseError                     who may write
│   ├── LeaseHeldError             another populator holds the store
│   └── LeaseLostError             this populator was ousted
├── WorkerError                    a worker process died again and again, or failed
│   └── LostWorkError              machines of a cluster went with work that is to be done again
├── InterruptedRunError            asked to stop before anything could be committed
└── UsageError                     options that do not go together
"""

from __future__ import annotations


class GenesisError(Exception):
    """Base of all of them; the message says what was expected, what was found, and what to do."""


class StoreError(GenesisError):
    """The object store could not do what was asked."""


class ObjectNotFoundError(StoreError):
    """There is no object of that key."""


class PreconditionFailedError(StoreError):
    """A conditional call found another object than the one it was conditional on; nothing was written."""


class StoreAccessError(StoreError):
    """No permission, wrong credentials, no such bucket, or a store that can only be read."""


class StoreFullError(StoreError):
    """No space left in the store."""


class StoreRemovedError(StoreError):
    """The store was removed or emptied under the process that writes to it; nothing more is written."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached, or still fails after every retry."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        """Says why.

        Args:
            message: one line for the user.
            retry_after_s: how long the server asked to wait before the next attempt, if it did.
        """
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SourceError(GenesisError):
    """Something about the input text."""


class UnknownSourceError(SourceError):
    """No source of that name is configured."""


class InputNotFoundError(SourceError):
    """No input file matches, or the repository or revision does not exist."""


class MissingFieldError(SourceError):
    """No row has the text field."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        """Says which.

        Args:
            message: one line for the user.
            fields: those that the rows have.
        """
        super().__init__(message)
        self.fields = fields


class CorruptInputError(SourceError):
    """An input file is truncated or damaged; the message names it and the position.

    What to do about it depends on what was made of the rows before: whoever knows that adds it.
    """


class InputChangedError(SourceError):
    """Input that was already turned into shards is not what it was."""


class TokenizerError(GenesisError):
    """Something about the vocabulary."""


class VocabularyMismatchError(TokenizerError):
    """A vocabulary does not extend the one it should."""


class InvalidTextError(TokenizerError):
    """A string holds a lone surrogate, or ids lie outside the vocabulary."""


class LeaseError(GenesisError):
    """Who may write to a store."""


class LeaseHeldError(LeaseError):
    """Another populator is writing to the store; the message names it."""


class LeaseLostError(LeaseError):
    """Another populator took the store over; this one stopped without harm."""


class WorkerError(GenesisError):
    """A worker process failed, or died more often than it may."""


class LostWorkError(WorkerError):
    """Machines of a cluster have gone, and with them work under way; begun again from the last commit it is done."""


class InterruptedRunError(GenesisError):
    """The run was asked to stop at a point where there is nothing to keep."""


class UsageError(GenesisError):
    """Options that do not go together, or a value out of range."""
