"""Where a peer's message becomes a value. An error that nobody foresaw beneath it is the peer's.

One that passed through would end the task that had asked, and with it the process.
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

BodyT = TypeVar("BodyT", bound=BaseModel)

logger = logging.getLogger(__name__)


@contextmanager
def peer_boundary(who: str) -> Iterator[None]:
    """Encloses the handling of one message of the peer ``who``, and nothing that is this node's own affair.

    Errors of this package, time-outs and cancellations pass through unchanged.

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
    """Parses the body of a verified frame; raises RefusedError (``body``) where the model does not take it."""
    expected = f"expected a body such as {model.__name__}"
    if frame.header.body is None:
        raise RefusedError(Reason.BODY, f"{expected}, found none")
    try:
        # As JSON, not as the parsed object: strict models take a list for a tuple only where JSON has no tuples.
        return model.model_validate_json(json.dumps(frame.header.body))
    except ValidationError as error:
        raise RefusedError(Reason.BODY, f"{expected}, found {first_line(error)}") from None
