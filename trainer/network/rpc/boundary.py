"""Where a peer's message becomes a value: a body that its model does not take, or an error that nobody foresaw.

Decoders raise this package's errors for what they know to be wrong. Beneath them are json, numpy, torch and gRPC, each
with errors of its own. `peer_boundary` makes those the peer's errors: one that passed through would end the task that
had asked, and with it the process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from trainer.errors import MalformedAnswerError, RefusedError, TrainerError
from trainer.network.rpc.envelope import SealedFrame, first_line
from trainer.network.rpc.messages import Reason

__all__ = ["parse_body", "peer_boundary"]

BodyT = TypeVar("BodyT", bound=BaseModel)

logger = logging.getLogger(__name__)


@contextmanager
def peer_boundary(who: str) -> Iterator[None]:
    """Encloses the handling of one message of one peer, and nothing that is this node's own affair.

    Errors of this package, time-outs and cancellations pass through unchanged.

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


def parse_body(frame: SealedFrame, model: type[BodyT]) -> BodyT:
    """Parses the body of a verified frame.

    Raises:
        RefusedError: ``body``: the model does not take it.
    """
    if frame.header.body is None:
        raise RefusedError(Reason.BODY, f"expected a body such as {model.__name__}, found none")
    try:
        # As JSON, not as the parsed object: strict models take a list for a tuple only where JSON has no tuples.
        return model.model_validate_json(json.dumps(frame.header.body))
    except ValidationError as error:
        raise RefusedError(
            Reason.BODY, f"expected a body such as {model.__name__}, found {first_line(error)}"
        ) from None
