"""``sources.json``: the text a store can be made from (spec G-1, G-2).

Added to those fields: ``revision`` (a branch or commit of the repository; it is resolved to a commit once and pinned),
``data_files`` (glob patterns inside the repository, in the order they are read), ``include`` and ``exclude`` (which of
the files that are found are read), ``merges`` (the source's share of the 31,734 merges a vocabulary of 32,000 ids has)
and ``share`` (its part of the tokens a run reads, for the loader).
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from manifests.documents import Document
from manifests.fields import Count, SourceName

TOTAL_MERGES = 31_734
"""32,000 − 10 specials − 256 bytes (spec G-5)."""


class SourceSpec(BaseModel):
    """One source. Written by hand, so a field that does not exist is an error, not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: SourceName
    hf_path: str | None = None
    """Dataset repository on the Hub, ``owner/name``; a source needs this or local files (``--input``)."""
    hf_name: str | None = None
    """A configuration that the repository's README.md declares: its files are read. Informative when ``data_files``
    are given, which then say what is read."""
    text_field: str = Field(default="text", min_length=1)
    target_shards: Count = 0
    priority: Count = 100
    enabled: bool = True
    revision: str = "main"
    data_files: tuple[str, ...] = ()
    """None: the files of ``hf_name``, or of the repository's only configuration, or all that can be read."""
    include: tuple[str, ...] = ()
    """Of the files found, only those that one of these patterns (`fnmatch`) fits; none: all of them."""
    exclude: tuple[str, ...] = ()
    """Of those, none that one of these patterns fits."""
    merges: Count = 0
    share: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Weight of its tokens in the mixtures that are read with this file; any sum."""


class SourcesFile(Document):
    """``sources.json``."""

    FILE: ClassVar[str] = "sources.json"

    sources: tuple[SourceSpec, ...]

    @model_validator(mode="after")
    def _names_and_shares(self) -> Self:
        names = [source.name for source in self.sources]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"sources named twice: {sorted(repeated)}")
        shares = sum(source.merges for source in self.sources)
        if shares > TOTAL_MERGES:
            raise ValueError(f"the merges shares sum to {shares}, expected at most {TOTAL_MERGES}")
        return self

    def get(self, name: str) -> SourceSpec | None:
        """The source of that name, if there is one."""
        return next((source for source in self.sources if source.name == name), None)

    def enabled(self) -> list[SourceSpec]:
        """The enabled sources, lowest ``priority`` number first."""
        return sorted((source for source in self.sources if source.enabled), key=lambda source: source.priority)


def builtin_sources() -> SourcesFile:
    """The five sources (spec G-1), as shipped with this package."""
    return SourcesFile.from_json(resources.files("manifests").joinpath("sources.json").read_bytes())
