"""What nodes must have in common to train one model together, and what to tell one that has not.

A node whose terms differ is turned away with the first thing that differs, before it can touch a round.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue

from manifests import canonical_json, sha256_hex
from trainer.errors import RefusedError

__all__ = ["Terms"]


class Terms(BaseModel):
    """The run as every member must know it; plain values, so that it travels and can be compared field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: dict[str, JsonValue]
    """Shape of the model, without the rows of its vocabulary, which grow."""
    tokenizer_lineage: str
    """Digest of what never changes in the vocabulary (pattern, special ids and the first merges)."""
    synchronisation: dict[str, JsonValue]
    """Inner steps, outer optimizer, fragments, rule, compression: whatever changes the result of a round."""

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    def check(self, other: Terms, who: str) -> None:
        """Refuses a peer that trains something else.

        Raises:
            RefusedError: with ``architecture``, ``vocabulary`` or ``settings`` as its reason.
        """
        _check_fields("architecture", self.architecture, other.architecture, who)
        if self.tokenizer_lineage != other.tokenizer_lineage:
            raise RefusedError(
                "vocabulary",
                f"{who}: expected the vocabulary {self.tokenizer_lineage[:12]}, found {other.tokenizer_lineage[:12]}; "
                "train from the same store, or in a run of its own (--run-id)",
            )
        _check_fields("settings", self.synchronisation, other.synchronisation, who)


def _check_fields(kind: str, ours: dict[str, JsonValue], theirs: dict[str, JsonValue], who: str) -> None:
    for name in sorted(ours.keys() | theirs.keys()):
        expected, found = ours.get(name), theirs.get(name)
        if expected != found:
            raise RefusedError(
                kind,
                f"{who}: this run has {name} {expected}, the node {str(found)[:80]}; give it the same {kind}, or a run "
                "of its own (--run-id)",
            )
