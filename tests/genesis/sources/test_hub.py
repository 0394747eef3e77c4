from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from genesis.errors import CorruptInputError, InputChangedError, InputNotFoundError, SourceError
from genesis.sources import parquet, read_batches, resolve, tasks
from genesis.sources.hub_client import HubRetryPolicy, auth_headers
from manifests import SourceSpec
from tests.support.documents import read_on, read_until_error
from tests.support.hub_server import COMMIT, Fault, HubServer, SeededFaults, hub_server

Serve = Callable[..., HubServer]
Texts = dict[str, list[bytes]]


def write_repository(folder: Path, seed: int = 0) -> dict[str, list[bytes]]:
    """A dataset of three formats; the texts of each."""
    source = random.Random(seed)
    names = ("p0", "p1", "z2", "z10", "g")
    texts = {name: [source.randbytes(200).hex() + str(n) for n in range(300)] for name in names}
    (folder / "data").mkdir(parents=True)
    (folder / "train").mkdir()
    (folder / "README.md").write_text("# A dataset\n")
    for name in ("p0", "p1"):
        ballast = pa.array([source.randbytes(2000).hex() for _ in range(300)])
        table = pa.table({"ballast": ballast, "text": pa.array(texts[name]), "more": ballast})
        pq.write_table(table, folder / "data" / f"{name}.parquet", row_group_size=70, write_statistics=False)
    lines = {name: b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts[name]) for name in texts}
    for name in ("z2", "z10"):
        (folder / "train" / f"{name}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines[name]))
    (folder / "g.json.gz").write_bytes(gzip.compress(lines["g"]))
    return {name: [text.encode() for text in found] for name, found in texts.items()}


def spec_of(*patterns: str, **fields: str) -> SourceSpec:
    return SourceSpec(name="mine", hf_path=fields.pop("hf_path", "someone/texts"), data_files=patterns, **fields)


EVERYTHING = spec_of("data/*.parquet", "train/*.jsonl.zst", "*.json.gz")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Serve]:
    """Serves a folder as the Hub that this process's client talks to."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(parquet, "_open_files", parquet._OpenFiles())
    with ExitStack() as stack:

        def start(folder: Path, **options: object) -> HubServer:
            hub = stack.enter_context(hub_server(folder, **options))
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
            auth_headers()  # The client's first, in a process, ask the Hub for a list of its own.
            hub.log.clear()
            return hub

        yield start
    huggingface_hub.close_session()


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """The texts of a dataset in `tmp_path`."""
    return write_repository(tmp_path)


@pytest.fixture
def hub(texts: Texts, tmp_path: Path, serve: Serve) -> HubServer:
    """A Hub that has it."""
    return serve(tmp_path)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of milliseconds where the server does not say how long."""
    policy = HubRetryPolicy(deadline_s=20.0, unreachable_s=0.3, timeout_s=5.0, first_wait_s=0.001, max_wait_s=0.01)
    monkeypatch.setattr(HubRetryPolicy, "from_environment", classmethod(lambda cls: policy))


def test_the_plan_is_pinned_and_in_the_order_of_the_patterns(texts, tmp_path, serve):
    hub = serve(tmp_path, page_size=2)
    plan = resolve(EVERYTHING)
    names = ["data/p0.parquet", "data/p1.parquet", "train/z2.jsonl.zst", "train/z10.jsonl.zst", "g.json.gz"]
    assert [file.name for file in plan.files] == names
    assert (plan.repo, plan.revision) == ("someone/texts", COMMIT)
    assert [file.size_bytes for file in plan.files] == [(tmp_path / name).stat().st_size for name in names]
    assert plan.files[0].location == f"hf://datasets/someone/texts@{COMMIT}/data/p0.parquet"
    assert not hub.requests("resolve")
    reading = read_on(plan)
    assert reading.documents == [text for name in ("p0", "p1", "z2", "z10", "g") for text in texts[name]]
    assert {(cursor.repo, cursor.revision) for cursor in reading.cursors} == {("someone/texts", COMMIT)}


@pytest.mark.slow
def test_reading_on_from_a_cursor_is_skipping(hub):
    plan = resolve(EVERYTHING)
    whole = read_on(plan)
    for count in (1, 70, 71, 299, 300, 450, 600, 601, 1199, 1400, 1500):
        rest = read_on(plan, whole.cursors[count - 1])
        assert rest.documents == whole.documents[count:]


def test_a_pinned_revision_is_read_whatever_the_branch_holds(tmp_path, serve):
    old, new = "a" * 40, "b" * 40
    texts = write_repository(tmp_path / "old", seed=1)
    write_repository(tmp_path / "new", seed=2)
    serve(tmp_path / "new", commit=new, commits={old: tmp_path / "old"})
    spec = spec_of("data/p0.parquet")
    assert resolve(spec).revision == new
    plan = resolve(spec, pinned_revision=old)
    reading = read_on(plan)
    assert reading.documents == texts["p0"]
    with pytest.raises(InputChangedError, match=r"aaaaaaaaaaaa.*bbbbbbbbbbbb"):
        list(tasks(resolve(spec), reading.cursors[5]))


def test_only_the_text_columns_ranges_travel(texts, hub):
    plan = resolve(spec_of("data/*.parquet"))
    text_bytes = sum(map(len, read_on(plan).documents))
    assert all(request.range for request in [*hub.requests("resolve"), *hub.requests("cdn")])
    groups, footers = 5 * 2, 2
    assert hub.sent_bytes("cdn") < text_bytes * 1.05 + footers * (64 << 10) < plan.size_bytes / 8
    assert len(hub.requests("resolve")) == 2
    assert len(hub.requests("cdn")) == groups + footers
    assert read_on(plan).documents == texts["p0"] + texts["p1"]
    assert len(hub.requests("cdn")) == 2 * groups + footers, "footers of the files opened last are kept"


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("seed", range(6))
def test_documents_are_the_same_through_a_storm_of_faults(texts, hub, seed, monkeypatch):
    monkeypatch.setattr("genesis.sources.ranges.WINDOW_BYTES", 20_000)
    monkeypatch.setattr(parquet, "_REMOTE_BUFFER_BYTES", 3_000)
    hub.seeded = SeededFaults(seed, probability=0.35)
    reading = read_on(resolve(EVERYTHING))
    assert reading.documents == [text for name in ("p0", "p1", "z2", "z10", "g") for text in texts[name]]
    answers = {request.status for request in hub.log}
    assert {206, 429, 500, 503} <= answers


@pytest.mark.usefixtures("fast")
def test_cut_connections_and_expired_addresses_are_gone_on_with(texts, hub, tmp_path):
    hub.inject("cdn", Fault(cut_after=10_000), Fault(cut_after=5_000))
    assert read_on(resolve(spec_of("train/z2.jsonl.zst"))).documents == texts["z2"]
    size = (tmp_path / "train/z2.jsonl.zst").stat().st_size
    starts = [int(request.range.removeprefix("bytes=").split("-")[0]) for request in hub.requests("cdn")]
    assert starts == [0, 10_000, 15_000]
    assert hub.sent_bytes("cdn") == size
    found: list[bytes] = []
    for task in tasks(resolve(spec_of("data/p0.parquet"))):
        hub.expire_addresses()
        found += [text for batch in read_batches(task) for text in batch.texts]
    assert found == texts["p0"]
    assert {request.status for request in hub.requests("cdn")} == {206, 403}


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("place", ["api", "resolve", "cdn"])
def test_what_the_server_says_to_wait_is_waited(hub, monkeypatch, place):
    waits: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", waits.append)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=15), usegmt=True)
    hub.inject(
        place,
        Fault(status=429, headers=(("Retry-After", "7"),)),
        Fault(
            status=429,
            headers=(("RateLimit", '"api";r=0;t=11'), ("RateLimit-Policy", '"fixed window";"api";q=5;w=300')),
        ),
        Fault(status=503, headers=(("Retry-After", later),)),
        Fault(status=502),
    )
    assert len(read_on(resolve(spec_of("data/p0.parquet"))).documents) == 300
    assert waits[:2] == [7.0, 11.0]
    assert 10 < waits[2] <= 15
    assert waits[3] < 1


@pytest.mark.usefixtures("fast")
def test_a_server_that_asks_for_more_than_the_deadline_is_given_up_at_once(hub):
    hub.inject("api", *[Fault(status=429, headers=(("Retry-After", "86400"),))] * 2)
    with pytest.raises(SourceError, match=r"someone/texts@main: still HTTP 429.*run the same command again"):
        resolve(EVERYTHING)
    assert len(hub.requests("api")) == 1


@pytest.mark.slow
def test_failing_until_the_deadline_is_one_line_and_keeps_what_was_read(texts, hub, monkeypatch):
    policy = HubRetryPolicy(deadline_s=2.0, unreachable_s=0.3, timeout_s=0.5, first_wait_s=0.05, max_wait_s=0.1)
    monkeypatch.setattr(HubRetryPolicy, "from_environment", classmethod(lambda cls: policy))
    plan = resolve(spec_of("data/p0.parquet"))
    given = tasks(plan)
    first = next(given)
    assert [text for batch in read_batches(first) for text in batch.texts] == texts["p0"][:70]
    hub.seeded = SeededFaults(0, probability=1.0, kinds=(Fault(status=503),))
    with pytest.raises(SourceError, match=r"data/p0\.parquet: still HTTP 503") as failure:
        list(read_batches(next(given)))
    assert "\n" not in str(failure.value)
    hub.seeded = SeededFaults(0, probability=1.0, kinds=(Fault(delay_s=1.0),))
    with pytest.raises(SourceError, match="cannot be reached"):
        list(read_batches(next(given)))


def test_a_host_that_is_not_there_and_offline_mode_are_one_line(hub, monkeypatch, fast):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(SourceError, match=r"http://127\.0\.0\.1:1 cannot be reached.*HF_ENDPOINT") as failure:
        resolve(EVERYTHING)
    assert "\n" not in str(failure.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        resolve(EVERYTHING)


def test_what_does_not_exist_is_not_retried(hub):
    for spec in (
        spec_of("data/*.parquet", hf_path="someone/else"),
        spec_of("data/*.parquet", revision="no-such-branch"),
        spec_of("nowhere/*.parquet"),
        spec_of("data/*.jsonl"),
    ):
        hub.log.clear()
        with pytest.raises(InputNotFoundError):
            resolve(spec)
        assert len(hub.log) <= 2
    with pytest.raises(InputNotFoundError, match="c" * 12):
        resolve(EVERYTHING, pinned_revision="c" * 40)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("address", ["", "huggingface.co", "ftp://hub", "http://:80", "http://[::1"])
def test_an_endpoint_that_is_none_is_said_at_once(hub, monkeypatch, address):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    with pytest.raises(
        SourceError, match=r"HF_ENDPOINT: expected an address such as https://huggingface\.co"
    ) as failure:
        resolve(EVERYTHING)
    assert repr(address) in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.usefixtures("fast")
def test_a_token_that_no_header_can_hold_is_said_at_once(hub, monkeypatch):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    monkeypatch.setenv("HF_TOKEN", "hf_sécret")
    with pytest.raises(SourceError, match=r"cannot be sent .*HF_TOKEN"):
        resolve(EVERYTHING)


@pytest.mark.parametrize(
    ("status", "headers", "kind", "with_token", "without"),
    [
        (
            401,
            {},
            InputNotFoundError,
            r"does not accept the token in HF_TOKEN .*mistyped",
            r"no such repo.*set HF_TOKEN",
        ),
        (
            404,
            {"X-Error-Code": "RepoNotFound"},
            InputNotFoundError,
            r"no such repository.*account of the token in HF_TOKEN may read it",
            r"no such repository.*set HF_TOKEN",
        ),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            SourceError,
            r"accept the dataset's terms.*with the account of the token in HF_TOKEN",
            r"accept the dataset's terms.*then set HF_TOKEN",
        ),
        (403, {}, SourceError, "let the token in HF_TOKEN read it", "then set HF_TOKEN"),
    ],
)
def test_advice_depends_on_whether_a_token_was_sent(hub, monkeypatch, status, headers, kind, with_token, without):
    fault = Fault(status=status, headers=tuple(headers.items()))
    hub.inject("api", fault, fault)
    with pytest.raises(kind, match=without):
        resolve(EVERYTHING)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SourceError, match=with_token) as failure:
        resolve(EVERYTHING)
    assert "set HF_TOKEN" not in str(failure.value)
    assert len(hub.requests("api")) == 2


def card(configurations: str) -> str:
    return f"---\nlicense: mit\nconfigs:\n{configurations}\n---\n# Texts\n"


def configured(**fields: str) -> SourceSpec:
    return SourceSpec(name="mine", hf_path="someone/texts", **fields)


TWO = """- config_name: tables
  data_files:
  - split: test
    path: data/p0.parquet
  - split: train
    path: ["data/p1*"]
- config_name: lines
  data_dir: train
"""


def plan_files(**fields: str) -> list[str]:
    return [file.name for file in resolve(configured(**fields)).files]


def test_a_configuration_of_the_readme_says_which_files(hub, tmp_path):
    (tmp_path / "README.md").write_text(card(TWO))
    assert plan_files(hf_name="tables") == ["data/p1.parquet"]
    assert plan_files(hf_name="lines") == ["train/z2.jsonl.zst", "train/z10.jsonl.zst"]
    for name in (None, "other"):
        with pytest.raises(InputNotFoundError, match=r"it declares tables, lines: give one with --hf-name"):
            resolve(configured(hf_name=name))
    (tmp_path / "README.md").write_text(card(TWO + "  default: true\n"))
    assert plan_files() == ["train/z2.jsonl.zst", "train/z10.jsonl.zst"]
    (tmp_path / "README.md").write_text(card("- config_name: one\n  data_files: 'data/*'\n"))
    assert plan_files() == ["data/p0.parquet", "data/p1.parquet"]


def test_a_repository_that_declares_nothing_is_read_whole_but_what_describes_it(hub, tmp_path):
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "data" / "notes.md").write_text("about")
    (tmp_path / ".cache.jsonl").write_text("{}")
    everything = ["data/p0.parquet", "data/p1.parquet", "g.json.gz", "train/z2.jsonl.zst", "train/z10.jsonl.zst"]
    assert plan_files() == everything
    (tmp_path / "README.md").unlink()
    assert plan_files() == everything
    with pytest.raises(InputNotFoundError, match=r"no configuration 'x'; its README\.md declares none"):
        resolve(configured(hf_name="x"))
    assert [file.name for file in resolve(spec_of("**/*.md")).files] == ["data/notes.md"]
    assert plan_files(include=("train/*", "*.gz"), exclude=("*z2*",)) == ["g.json.gz", "train/z10.jsonl.zst"]
    with pytest.raises(InputNotFoundError, match=r"--exclude '\*'"):
        resolve(configured(exclude=("*",)))


@pytest.mark.parametrize(
    "text", ["---\nconfigs: [\n---\n", "---\na: &a [*a]\n\tb\n---\n", "---\nconfigs:\n- config_name: x\n---\n"]
)
def test_a_readme_that_cannot_be_understood_is_one_line(hub, tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SourceError, match=r"hf://someone/texts/PATTERN") as failure:
        resolve(configured(hf_name="x"))
    assert "\n" not in str(failure.value)


def test_a_gated_dataset_asks_for_a_token_and_takes_it(texts, hub, monkeypatch):
    hub.gated_token = "hf_secret"
    spec = spec_of("data/p0.parquet")
    with pytest.raises(SourceError, match=r"accept the dataset's terms.*HF_TOKEN"):
        resolve(spec)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert read_on(resolve(spec)).documents == texts["p0"]
    assert all(request.authorized for request in hub.requests("resolve") if request.status == 302)
    assert not any(request.authorized for request in hub.requests("cdn")), "the token stays with the Hub"


def test_files_that_are_not_what_the_hub_lists_are_refused(hub, tmp_path):
    hub.inject("cdn", Fault(ignore_range=True))
    with pytest.raises(SourceError, match=r"HTTP 206.*found HTTP 200.*--input"):
        list(tasks(resolve(spec_of("data/p0.parquet"))))
    plan = resolve(spec_of("train/*.zst"))
    path = tmp_path / "train" / "z2.jsonl.zst"
    path.write_bytes(path.read_bytes() + b"more")
    assert "z2.jsonl.zst" in str(read_until_error(plan, CorruptInputError).error)


def test_deadlines_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("GENESIS_HUB_DEADLINE_S", "5")
    monkeypatch.setenv("GENESIS_HUB_TIMEOUT_S", "2.5")
    policy = HubRetryPolicy.from_environment()
    assert (policy.deadline_s, policy.unreachable_s, policy.timeout_s) == (5.0, 5.0, 2.5)
    monkeypatch.setenv("GENESIS_HUB_DEADLINE_S", "soon")
    with pytest.raises(SourceError, match=r"GENESIS_HUB_DEADLINE_S.*'soon'"):
        HubRetryPolicy.from_environment()
