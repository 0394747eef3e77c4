"""What the page shows of real stores: sound, hostile, damaged, empty, of a foreign vocabulary; and as one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from genesis.errors import GenesisError, StoreUnavailableError, UsageError
from genesis.inspection import inspect_shard
from genesis.snapshot import StoreEmptyError, require_manifest
from genesis.store import FolderStore
from genesis.store_page.models import Piece
from genesis.store_page.report import ReportOptions, store_report
from genesis.store_page.service import MAX_PAGE_TOKENS, StoreView
from genesis.store_page.shard_reading import FolderShards
from genesis.store_page.shard_table import ShardTable
from genesis.verification import verify_store
from manifests import EOS_ID, MANIFEST_KEY, ShardFormatError, builtin_sources, decode_shard, shard_key
from tests.genesis.store_page.conftest import HOSTILE, view_of
from tests.support.small_store import manifest_of, populate_source, segment_of, write_input


def bytes_of(pieces: tuple[Piece, ...]) -> bytes:
    parts = [piece.text.encode() if piece.text is not None else bytes.fromhex(piece.hex or "") for piece in pieces]
    return b"".join(parts)


def whole_document(view: StoreView, shard: int, document: int, page_tokens: int) -> tuple[list[int], bytes]:
    """All ids and bytes of a document in a shard, page by page."""
    ids: list[int] = []
    body = b""
    token: int | None = 0
    while token is not None:
        page = view.document(shard, document, token, page_tokens)
        assert page.first_token == len(ids)
        ids += [piece.id for piece in page.pieces]
        body += bytes_of(page.pieces)
        token = page.next_token
    assert len(ids) == page.num_tokens
    return ids, body


def test_pages_of_documents_are_the_shard(small_store: FolderStore, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    view = view_of(folder)
    manifest = manifest_of(folder)
    for shard in range(0, manifest.total_shards, 5):
        expected = decode_shard((folder / shard_key(shard)).read_bytes()).tolist()
        inspected = inspect_shard(small_store, manifest, shard, num_documents=10_000).documents
        first = view.document(shard, 0)
        assert first.num_documents == len(inspected)
        found: list[int] = []
        for document, expected_view in enumerate(inspected):
            ids, body = whole_document(view, shard, document, 37)
            found += ids
            assert body.decode(errors="replace") == expected_view.text
            page = view.document(shard, document, max_tokens=1)
            assert (page.ordinal, page.continues_after) == (expected_view.ordinal, expected_view.continues_after)
            assert page.begins_before is expected_view.begins_before
        assert found == expected


def test_ordinals_find_their_documents(small_store: FolderStore, tmp_path: Path) -> None:
    view = view_of(tmp_path / "store")
    for entry in segment_of(tmp_path / "store").shards:
        for ordinal in {entry.first_document, entry.last_document}:
            page = view.document_of_source(entry.source, ordinal, max_tokens=5)
            assert (page.source, page.ordinal, page.begins_before) == (entry.source, ordinal, False)
    with pytest.raises(UsageError, match="no shard holds document 1000000 of alpha; its last is"):
        view.document_of_source("alpha", 1_000_000)
    with pytest.raises(UsageError, match="expected one of the sources alpha, beta, found 'gamma'"):
        view.document_of_source("gamma", 0)


def test_what_cannot_be_is_refused(small_store: FolderStore, tmp_path: Path) -> None:
    view = view_of(tmp_path / "store")
    for shard, document, token in ((10**15, 0, 0), (0, 10**6, 0), (0, -(10**6), 0), (0, 0, 10**9)):
        with pytest.raises(UsageError, match="asked for"):
            view.document(shard, document, token)
    assert len(view.document(0, 0, 0, 10**9).pieces) <= MAX_PAGE_TOKENS
    assert view.document(0, -1).document == view.document(0, 0).num_documents - 1


def test_hostile_documents_come_back_byte_for_byte(hostile_folder: Path) -> None:
    view = view_of(hostile_folder)
    for ordinal, text in enumerate(HOSTILE):
        page = view.document_of_source("hostile", ordinal, max_tokens=MAX_PAGE_TOKENS)
        assert bytes_of(page.pieces).decode() == text
        assert page.pieces[-1].special == "<|eos|>" and page.pieces[-1].id == EOS_ID
        assert json.loads(page.model_dump_json())
    long = view.document_of_source("hostile", 2 * len(HOSTILE), max_tokens=MAX_PAGE_TOKENS)
    assert long.continues_after and len(long.pieces) == MAX_PAGE_TOKENS
    assert len(long.model_dump_json()) < 1_000_000
    goes_on = view.document(long.next_shard or 0, 0)
    assert goes_on.begins_before and goes_on.ordinal == long.ordinal


def test_a_foreign_vocabulary(foreign_folder: Path) -> None:
    view = view_of(foreign_folder)
    overview = view.overview()
    assert overview.vocabulary is not None and overview.vocabulary.origin is not None
    page = view.document_of_source("foreign", 1, max_tokens=MAX_PAGE_TOKENS)
    assert bytes_of(page.pieces).decode() == f"{HOSTILE[4]} number 0"
    assert page.pieces[-1].special == "<|end_of_text|>"
    found = view.vocabulary(text="er")
    assert found.num_matches >= 1 and bytes_of(found.encoded) == b"er"
    assert view.vocabulary(token_id=found.encoded[0].id).token is not None


def test_reading_a_shard_verifies_it_and_a_damaged_one_shows_nothing(small_store: FolderStore, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    view = view_of(folder)
    assert view.refreshed().index.verified_shards == 0  # type: ignore[union-attr]
    view.document(0, 0)
    assert view.shard(0).check == "verified"
    path = folder / shard_key(1)
    body = bytearray(path.read_bytes())
    body[900] ^= 1
    path.write_bytes(body)
    with pytest.raises(ShardFormatError, match=r"shard_1\.pt: expected sha256"):
        view.document(1, 0)
    assert view.shard(1).check == "damaged"
    (folder / shard_key(2)).unlink()
    with pytest.raises(ShardFormatError, match="no such object"):
        view.document(2, 0)
    index = view.refreshed().index
    assert index is not None and (index.verified_here, index.damaged_shards) == (1, 2)
    # Damaged after it was read: another file, which is checked again.
    path = folder / shard_key(0)
    path.unlink()
    path.write_bytes(body)
    with pytest.raises(ShardFormatError):
        view.document(0, 0)
    assert view.shard(0).check == "damaged"


def test_what_verify_found_is_shown(small_store: FolderStore, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    (folder / shard_key(3)).write_bytes(b"")
    report = verify_store(small_store, threads=2)
    total = manifest_of(folder).total_shards
    assert report.verified_shards == ((0, 2), (4, total - 1)) and report.damaged_shards == ((3, 3),)
    view = view_of(folder)
    view.give_report(report)
    overview = view.overview()
    assert overview.index is not None and overview.verified is not None
    assert (overview.index.verified_shards, overview.index.damaged_shards) == (total - 1, 1)
    assert (overview.index.verified_here, overview.verified.num_problems) == (0, 1)
    with pytest.raises(UsageError, match="expected a report on this store"):
        view.give_report(report.model_copy(update={"created_at": "2020-01-01T00:00:00Z"}))
    with pytest.raises(UsageError, match="of this release"):
        view.give_report(report.model_copy(update={"verified_shards": None}))


def test_a_store_that_grows(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    populate_source(store, "alpha", write_input(tmp_path, "alpha"))
    view = view_of(tmp_path / "store")
    before = view.overview()
    ids = before.vocabulary.ids if before.vocabulary else 0
    populate_source(store, "beta", write_input(tmp_path, "beta"))
    after = view.refreshed()
    while view.read_index():
        """The last segment, again."""
    after = view.refreshed()
    assert after.totals is not None and before.totals is not None and after.index is not None
    assert after.totals.shards > before.totals.shards == after.sources[0].shards
    assert after.index.indexed_shards == after.totals.shards
    assert [commit.sequence for commit in after.commits] == [after.sequence, before.sequence]
    assert after.vocabulary is not None and after.vocabulary.ids > ids
    assert view.vocabulary().ids == after.vocabulary.ids
    assert [step.source for step in after.vocabulary_steps] == ["alpha", "beta"]
    assert view.document_of_source("beta", 0).source == "beta"


def test_an_ordinal_before_the_index_is_read(small_store: FolderStore, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    table = ShardTable()
    view = StoreView(small_store, "store", builtin_sources(), table, FolderShards(folder, table.note_check))
    with pytest.raises(StoreUnavailableError, match="the index is read up to 0 of"):
        view.document_of_source("alpha", 0)


@pytest.mark.parametrize(
    ("body", "state"),
    [(None, "empty"), (b"{}", "damaged"), (b'{"total_shards": NaN}', "damaged"), (b"\xff", "damaged")],
)
def test_an_empty_and_a_damaged_store_are_one_line(tmp_path: Path, body: bytes | None, state: str) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    if body is not None:
        (folder / MANIFEST_KEY).write_bytes(body)
    view = view_of(folder)
    overview = view.overview()
    assert overview.state == state and overview.problem and "\n" not in overview.problem
    with pytest.raises(StoreEmptyError):
        view.document(0, 0)
    assert view.grid(0, 100, 10).cells == ()
    with pytest.raises(GenesisError):
        store_report(view.store, builtin_sources(), ReportOptions())


def test_a_report_holds_what_the_page_shows(small_store: FolderStore, tmp_path: Path) -> None:
    report = store_report(
        small_store, builtin_sources(), ReportOptions(documents=6, tokens=50, seed=3), name="a <name>"
    )
    assert report.store.totals is not None and report.store.index is not None
    assert report.shards.num_shards == report.shards.indexed_shards == report.store.totals.shards
    assert {page.source for page in report.documents} == {"alpha", "beta"}
    assert all(len(page.pieces) <= 50 for page in report.documents)
    assert len({page.shard for page in report.documents}) == report.store.index.verified_here
    assert len(report.tokens) == report.store.vocabulary.ids  # type: ignore[union-attr]
    again = store_report(small_store, builtin_sources(), ReportOptions(documents=6, tokens=50, seed=3))
    assert again.documents == report.documents
    html = report.html()
    data = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL)
    assert data is not None and json.loads(data[1])["store"]["totals"]["shards"] == report.store.totals.shards
    assert "<title>a &lt;name&gt;: store</title>" in html
    assert require_manifest(small_store).manifest.sequence == report.store.sequence


def test_a_report_on_a_hostile_store_has_no_markup_of_it(hostile_folder: Path) -> None:
    report = store_report(FolderStore(hostile_folder), builtin_sources(), ReportOptions(documents=12, tokens=2_000))
    html = report.html()
    assert "<img src=x" not in html and "<script>document.title" not in html
    assert html.count("</script>") == 2 and "\u2028" not in html.partition('id="page-data"')[2]


@pytest.mark.parametrize("options", [{"documents": -1}, {"documents": 10**6}, {"tokens": 0}, {"tokens": 10**6}])
def test_a_report_that_asks_for_too_much_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected"):
        ReportOptions(**options)
