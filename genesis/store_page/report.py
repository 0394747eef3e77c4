"""A store as one HTML file: what the page shows, with the data inside.

The index is read whole, so the grid is complete. Documents are drawn by a seed: as many of each source as of any other,
from shards that are chosen at random, each held against the index before anything of it is shown. A vocabulary of at
most 65,536 ids comes along whole, so that it can be searched. It works for any store, also one behind HTTP; it reads
one segment (0.35 MB) for a thousand shards and one shard for each sampled document.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from genesis import __version__
from genesis.errors import GenesisError, UsageError
from genesis.pages import single_file
from genesis.store import ReadableStore
from genesis.store_page.models import DocumentPage, Piece, ShardGrid, StoreOverview, VocabularySearch
from genesis.store_page.page import STORE_PAGE
from genesis.store_page.routes import MAX_CELLS
from genesis.store_page.service import MAX_PAGE_TOKENS, StoreView
from genesis.store_page.shard_reading import StoreShards
from genesis.store_page.shard_table import ShardTable
from genesis.verification import VerifyReport
from manifests import ContractError, SourcesFile

REPORT_FORMAT = 1
MAX_DOCUMENTS = 500
_MAX_LISTED_IDS = 65_536
_MAX_REPORT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report holds."""

    documents: int = 12
    """How many are sampled."""
    tokens: int = 800
    """Ids of each that are shown at most."""
    seed: int = 0
    """Of the sample."""

    def __post_init__(self) -> None:
        if not 0 <= self.documents <= MAX_DOCUMENTS:
            raise UsageError(f"--documents: expected 0 to {MAX_DOCUMENTS}, found {self.documents}")
        if not 1 <= self.tokens <= MAX_PAGE_TOKENS:
            raise UsageError(f"--tokens: expected 1 to {MAX_PAGE_TOKENS}, found {self.tokens}")


class StoreReport(BaseModel):
    """A report's data: what its page shows, and ``genesis report --json`` prints."""

    model_config = ConfigDict(frozen=True)

    format: int = REPORT_FORMAT
    kind: str = "store"
    software: str
    store: StoreOverview
    shards: ShardGrid
    documents: tuple[DocumentPage, ...]
    vocabulary: VocabularySearch | None
    tokens: tuple[Piece, ...]
    """The whole vocabulary, if it is small enough."""
    measured: tuple[str, ...]
    """How the figures came about."""

    def html(self) -> str:
        """The page with this inside.

        Raises:
            UsageError: it is too large for a page.
        """
        return single_file(STORE_PAGE, self.model_dump(mode="json"), title=f"{self.store.name}: store")


def store_report(
    store: ReadableStore,
    sources: SourcesFile,
    options: ReportOptions,
    *,
    name: str | None = None,
    verify_report: VerifyReport | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> StoreReport:
    """Reads a store for a report.

    Args:
        store: which.
        sources: gives the targets.
        options: what the report holds.
        name: what to call the store; by default its address.
        verify_report: of ``genesis verify``, whose findings are shown.
        on_progress: told (shards of the index read, all shards) now and then.

    Raises:
        UsageError: the verification is not of this store.
        GenesisError: there is no store, or nothing of it can be read.
    """
    began_at = time.monotonic()
    table = ShardTable()
    view = StoreView(store, name or store.url, sources, table, StoreShards(store, table.note_check))
    if verify_report is not None:
        view.give_report(verify_report)
    overview = view.overview()
    if overview.state != "ready":
        raise GenesisError(f"{store.url}: {overview.problem}")
    while view.read_index():
        if on_progress is not None:
            on_progress(table.state().indexed_shards, table.total_shards)
    documents, problems = _sample(view, options)
    overview = view.refreshed()
    has_vocabulary = overview.vocabulary is not None and overview.published_sequence is not None
    vocabulary, tokens, vocabulary_problems = _vocabulary(view) if has_vocabulary else (None, (), [])
    return StoreReport(
        software=f"genesis {__version__}",
        store=overview,
        shards=view.grid(0, table.total_shards, MAX_CELLS),
        documents=documents,
        vocabulary=vocabulary,
        tokens=tokens,
        measured=(*_measured(overview, options, time.monotonic() - began_at), *problems, *vocabulary_problems),
    )


def _sample(view: StoreView, options: ReportOptions) -> tuple[tuple[DocumentPage, ...], list[str]]:
    """Documents by a seed, the sources taking turns; and what could not be read."""
    rng = random.Random(options.seed)
    names = [source.name for source in view.overview().sources if source.shards]
    found: dict[tuple[int, int], DocumentPage] = {}
    problems: list[str] = []
    for turn in range(options.documents if names else 0):
        shard_id = view.table.draw_shard(names[turn % len(names)], rng)
        if shard_id is None:
            continue
        try:
            first = view.document(shard_id, 0, max_tokens=1)
            # The first has the end of another document before it, the last is cut off: rather one that is whole.
            whole = range(1, first.num_documents - 1) or range(first.num_documents)
            page = view.document(shard_id, rng.choice(whole), max_tokens=options.tokens)
        except (GenesisError, ContractError) as error:
            problems.append(f"shard {shard_id} is not shown: {error}"[:500])
            continue
        found[page.shard, page.document] = page
    return tuple(sorted(found.values(), key=lambda page: (page.source, page.ordinal))), problems


def _vocabulary(view: StoreView) -> tuple[VocabularySearch | None, tuple[Piece, ...], list[str]]:
    try:
        search = view.vocabulary()
        return search, view.all_tokens(_MAX_LISTED_IDS), []
    except (GenesisError, ContractError) as error:
        return None, (), [f"the vocabulary is not shown: {error}"[:500]]


def _measured(overview: StoreOverview, options: ReportOptions, seconds: float) -> list[str]:
    index = overview.index
    return [
        f"Read at {overview.read_at} from {overview.name} by genesis {__version__}, in {seconds:.1f} s.",
        f"Shards, tokens, documents and bytes are the sums of commit {overview.sequence}, as the populator counted "
        "them and 'genesis verify' checks them.",
        "Speed is the populator's mean over its run, as its lease says; the time left is to the end of the input or to "
        "the target, whichever comes first, at that speed.",
        f"Of {index.indexed_shards if index else 0} shards in the index, {index.verified_shards if index else 0} were "
        f"read whole and held against it: {index.verified_here if index else 0} for this report, the others by "
        "'genesis verify'.",
        f"Documents were drawn by seed {options.seed}, the sources taking turns; of each, {options.tokens} ids are "
        "shown at most.",
    ]


def read_verify_report(path: Path) -> VerifyReport:
    """What ``genesis verify --json`` printed.

    Raises:
        UsageError: the file cannot be read, or is something else.
    """
    try:
        if path.stat().st_size > _MAX_REPORT_BYTES:
            raise UsageError(f"--verify-report {path}: expected at most {_MAX_REPORT_BYTES >> 20} MiB, found more")
        return VerifyReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--verify-report {path}: {error.strerror}") from None
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"--verify-report {path}: expected what 'genesis verify --json' prints, found another: {where} "
            f"{first['msg']}"
        ) from None
