"""``genesis-export.json``: what an export was made of, and while it is being made, where it goes on.

It lies beside the files. During a run it is replaced at every checkpoint, after the files it speaks of are on the disk;
afterwards it stays, with ``complete`` true, as the export's origin: the vocabulary's digest, which shards, how many
documents. `genesis import` reads that digest. The same command in a folder whose record is complete does nothing.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from genesis.export.options import ExportFormat, ExportOptions
from genesis.token_formats import EXPORT_RECORD_NAME
from manifests import ContractError, sha256_hex
from manifests.documents import Document, Part
from manifests.fields import Count, Sha256, SourceName, TokenId

RECORD_NAME = EXPORT_RECORD_NAME
_NO_SHARDS = sha256_hex(b"")


class ExportPosition(Part):
    """A place in the walk over the chosen shards, and what happened on the way there."""

    shard: Count = 0
    """Shards of the walk that are behind it."""
    offset: Count = 0
    """Ids of the next one that are behind it."""
    skipping: bool = False
    """Within a document that began before the chosen shards."""
    skipped_tokens: Count = 0
    """Ids passed over as parts of such documents: they belong to an export of the shards before."""
    cut_tokens: Count = 0
    """Ids left out because the store has no end of their document (MDS with windows: of their window)."""
    shards_sha256: Sha256 = _NO_SHARDS
    """Digest over the digests of the shards behind it: tells whether a store is the one that the export began with."""

    def moved(self, num_tokens: int) -> ExportPosition:
        """The position ``num_tokens`` further on in the same shard."""
        return self.model_copy(update={"offset": self.offset + num_tokens, "skipping": False})

    def behind(self, shard_sha256: str) -> ExportPosition:
        """The beginning of the shard after this one, which has the digest ``shard_sha256``."""
        chain = sha256_hex(bytes.fromhex(self.shards_sha256 + shard_sha256))
        return self.model_copy(update={"shard": self.shard + 1, "offset": 0, "shards_sha256": chain})


class ExportRequest(Part):
    """The options that make a difference to the files."""

    to: ExportFormat
    source: SourceName | None = None
    first_shard: Count = 0
    end_shard: Count | None = None
    name: str
    seq_len: Count | None = None
    size_limit_bytes: Count | None = None
    compression: str | None = None
    hashes: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: ExportOptions) -> ExportRequest:
        """What ``options`` ask for."""
        mds = options.target is ExportFormat.MDS
        return cls(
            to=options.target,
            source=options.source,
            first_shard=options.first_shard,
            end_shard=options.end_shard,
            name=options.name,
            seq_len=options.seq_len,
            size_limit_bytes=options.size_limit_bytes if mds else None,
            compression=options.compression,
            hashes=options.hashes,
        )


class ExportRecord(Document):
    """``genesis-export.json``."""

    FILE: ClassVar[str] = RECORD_NAME

    request: ExportRequest
    complete: bool = False
    store: str
    """Address, for people: nothing is compared with it."""
    total_shards: Count
    """Shards of the store when the export began: it takes none of those that came later."""
    vocabulary_ids: TokenId
    vocabulary_sha256: Sha256 | None = None
    eos_id: TokenId
    """Ends every document."""
    dtype: str
    """Of an id, as numpy spells it: ``<u2``."""
    position: ExportPosition = ExportPosition()
    file_bytes: dict[str, Count] = Field(default_factory=dict)
    """Sizes, at ``position``, of the files that are being written."""
    documents: Count = 0
    """Documents (MDS: samples) in the files at ``position``."""
    tokens: Count = 0
    """Their ids, the EOS of each included."""

    def check_request(self, request: ExportRequest, where: str) -> None:
        """Refuses to go on with other options.

        Raises:
            ContractError: the export in the folder is another one.
        """
        if request == self.request:
            return
        ours, theirs = request.model_dump(mode="json"), self.request.model_dump(mode="json")
        differing = next(name for name in ours if ours[name] != theirs[name])
        raise ContractError(
            f"{where} holds an export with {differing} {theirs[differing]}, asked for {ours[differing]}; give another "
            f"folder, or delete the files there with {RECORD_NAME}"
        )
