"""Where what a peer sent is made into something: an error that nobody foresaw there is that peer's, and nobody else's.

Decoders raise this package's errors for what they know to be wrong. Beneath them are json, numpy, torch and gRPC, each
with errors of its own, and one that went on from there would end the task, and with it the process, that had asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import MalformedAnswerError, TrainerError

__all__ = ["peer_boundary"]

logger = logging.getLogger(__name__)


@contextmanager
def peer_boundary(who: str) -> Iterator[None]:
    """Encloses the handling of one message of one peer, and nothing that is this node's own affair.

    Errors of this package, time-outs and cancellations go through as they are.

    Args:
        who: the peer, for messages.

    Raises:
        MalformedAnswerError: anything else was raised; logged with its traceback.
    """
    try:
        yield
    except (TrainerError, TimeoutError):
        raise
    except Exception as error:
        logger.warning("%s sent what cannot be handled", who, exc_info=True)
        raise MalformedAnswerError(
            f"{who} sent what cannot be handled ({type(error).__name__}: {str(error)[:200]})"
        ) from error
