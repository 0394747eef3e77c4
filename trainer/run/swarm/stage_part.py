"""What the members of a stage's rounds see of a node that holds the whole model: the stage's part of it."""

from __future__ import annotations

from collections.abc import Callable

from trainer.network.discovery import Announcement
from trainer.run.swarm.shape import WHOLE, SwarmShape


def seen_as_part(stage: str, shape: SwarmShape) -> Callable[[Announcement], Announcement]:
    """Returns what members of a stage's group make of an announcement: of a whole node's, the stage's part.

    Of a node that trains by other terms they make nothing else, and ignore it.
    """
    whole, of_stage = shape.terms(WHOLE).digest(), shape.terms(stage).digest()

    def seen(said: Announcement) -> Announcement:
        part = next((part for part in said.parts if part.stage == stage), None)
        if part is None or said.terms_digest != whole:
            return said
        return said.model_copy(
            update={
                "terms_digest": of_stage,
                "outer_step": part.outer_step,
                "state_digest": part.state_digest,
                "stage": part.as_worker(),
            }
        )

    return seen
