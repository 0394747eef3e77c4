"""Bodies between pydantic models and the JSON of a head."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc.envelope import SealedFrame, first_line
from trainer.network.rpc.reasons import Reason

__all__ = ["dump_body", "parse_body"]

BodyT = TypeVar("BodyT", bound=BaseModel)


def dump_body(body: BaseModel) -> dict[str, Any]:
    """What the head carries.

    Raises:
        TrainerUsageError: the model is not one of named fields.
    """
    dumped = body.model_dump(mode="json")
    if not isinstance(dumped, dict):
        raise TrainerUsageError(f"expected a body with named fields, found {type(body).__name__}")
    return dumped


def parse_body(frame: SealedFrame, model: type[BodyT]) -> BodyT:
    """The body of a verified frame.

    Raises:
        RefusedError: ``body``: the model does not take it.
    """
    if frame.head.body is None:
        raise RefusedError(Reason.BODY, f"expected a body such as {model.__name__}, found none")
    try:
        # As JSON, not as the parsed object: strict models take a list for a tuple only where JSON has no tuples.
        return model.model_validate_json(json.dumps(frame.head.body))
    except ValidationError as error:
        raise RefusedError(
            Reason.BODY, f"expected a body such as {model.__name__}, found {first_line(error)}"
        ) from None
