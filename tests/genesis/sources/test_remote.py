"""Input in S3 buckets and behind web servers: the plans and documents of local files, through faults, pinned."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from genesis.errors import InputChangedError, InputNotFoundError, SourceError, UsageError
from genesis.sources import InputPlan, buckets, parquet, resolve, tasks, web
from genesis.store.base import PerProcess
from genesis.store.http import connect
from genesis.store.limits import Meter, RetryPolicy
from genesis.store.s3_bucket import S3Bucket
from manifests import SourceSpec
from tests.support.documents import read_on
from tests.support.fault_proxy import Fault, FaultProxy, Reply
from tests.support.s3_servers import Server, moto_s3, point_boto3_at, rclone_http, rclone_s3, s3_client

SPEC = SourceSpec(name="mine")
QUICK = RetryPolicy(
    deadline_s=30, first_contact_s=0.5, connect_timeout_s=2, read_timeout_s=2, first_wait_s=0.005, longest_wait_s=0.05
)
FILES = ("a.parquet", "b.jsonl.zst", "deeper/c 1.csv", "deeper/d=2/e.json", "f.txt")
LEFT_OUT = ("README.md", ".hidden.jsonl", "deeper/.git/x.txt", "_SUCCESS")
Point = Callable[[int], None]


def write_input(folder: Path) -> list[bytes]:
    """Files of every format, and some that are not read; the documents."""
    source = random.Random(4)
    texts = [f"{number} {source.randbytes(150).hex()}" for number in range(240)]
    for name in (*FILES, *LEFT_OUT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("about")
    pq.write_table(pa.table({"n": range(60), "text": texts[:60]}), folder / FILES[0], row_group_size=20)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[60:120])
    (folder / FILES[1]).write_bytes(zstandard.compress(lines.encode()))
    (folder / FILES[2]).write_text("text\n" + "\n".join(texts[120:180]))
    (folder / FILES[3]).write_text(json.dumps([{"text": text} for text in texts[180:239]], indent=1))
    (folder / FILES[4]).write_text(texts[239])
    return [text.encode() for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input")


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[bytes]:
    return write_input(folder / "raw" / "set")


@pytest.fixture(scope="module")
def moto(folder: Path, texts: list[bytes]) -> Iterator[Server]:
    with moto_s3("raw") as server:
        client = s3_client(server)
        for path in sorted((folder / "raw").rglob("*")):
            if path.is_file():
                key = path.relative_to(folder / "raw").as_posix()
                client.put_object(ACL="public-read", Bucket="raw", Key=key, Body=path.read_bytes())
        client.put_object(ACL="public-read", Bucket="raw", Key="set/folder/", Body=b"")
        client.close()
        yield server


@pytest.fixture(scope="module")
def rclone(folder: Path, texts: list[bytes]) -> Iterator[Server]:
    with rclone_s3(folder, "raw") as server:
        yield server


@pytest.fixture(scope="module")
def plain_web(folder: Path, texts: list[bytes]) -> Iterator[Server]:
    with rclone_http(folder / "raw") as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quick policies, and no connection of another test."""
    made: list[S3Bucket] = []

    def bucket(name: str) -> S3Bucket:
        made.append(S3Bucket(name, QUICK, Meter()))
        return made[-1]

    for module in (web, buckets):
        monkeypatch.setattr(module, "_POLICY", QUICK)
    client = PerProcess(lambda: connect(QUICK))
    monkeypatch.setattr(buckets, "_bucket", functools.cache(bucket))
    monkeypatch.setattr(web, "_client", client)
    monkeypatch.setattr(parquet, "_open_files", parquet._OpenFiles())
    web._retrier.cache_clear()
    yield
    web._retrier.cache_clear()
    for each in (*made, client.peek()):
        if each is not None:
            each.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Points boto3 at a server, or at a proxy of it."""

    return lambda server, port=None: point_boto3_at(server, port, monkeypatch)


@pytest.fixture
def proxy() -> Iterator[Callable[..., FaultProxy]]:
    with ExitStack() as stack:
        yield lambda port, **options: stack.enter_context(FaultProxy(port, **options))


def names(plan: InputPlan) -> list[str]:
    return [file.name for file in plan.files]


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_bucket_is_read_as_its_local_copy(server, request, folder, texts, s3):
    s3(request.getfixturevalue(server))
    local = resolve(SPEC, [str(folder / "raw" / "set")])
    plan = resolve(SPEC, ["s3://raw/set"])
    assert names(plan) == names(local) == [*FILES]
    assert [file.size_bytes for file in plan.files] == [file.size_bytes for file in local.files]
    reading = read_on(plan)
    assert reading.documents == read_on(local).documents == texts
    for count in (1, 59, 60, 61, 130, 185, 239, 240):
        assert read_on(plan, reading.cursors[count - 1]).documents == texts[count:]


def test_patterns_keys_and_filters_choose_among_a_buckets_files(moto, s3):
    s3(moto)
    assert names(resolve(SPEC, ["s3://raw/set/"])) == [*FILES]
    assert names(resolve(SPEC, ["s3://raw"])) == [*FILES]
    assert names(resolve(SPEC, ["s3://raw/**/*.json", "s3://raw/set/deeper/c 1.csv"])) == ["c 1.csv", "d=2/e.json"]
    assert names(resolve(SPEC, ["s3://raw/set/*.parquet"])) == ["a.parquet"]
    assert names(resolve(SPEC, ["s3://raw/set/README.md"])) == ["README.md"]
    assert names(resolve(SPEC, ["s3://raw/set/.h*"])) == [".hidden.jsonl"]
    spec = SPEC.model_copy(update={"include": ("*.json", "deeper/*"), "exclude": ("*.csv",)})
    assert names(resolve(spec, ["s3://raw/set"])) == ["deeper/d=2/e.json"]
    with pytest.raises(SourceError, match=r"raw/set/_SUCCESS: expected a file of one of"):
        resolve(SPEC, ["s3://raw/set/*"])
    for text in ("s3://raw/set/*.gz", "s3://raw/nothing", "s3://raw/set/a"):
        with pytest.raises(InputNotFoundError, match="no such object"):
            resolve(SPEC, [text])
    with pytest.raises(SourceError, match="bucket"):
        resolve(SPEC, ["s3://other/x.jsonl"])
    with pytest.raises(UsageError, match="s3://bucket"):
        resolve(SPEC, ["s3:///x.jsonl"])


def test_local_bucket_and_web_files_come_together_with_names_of_their_own(moto, folder, texts, s3):
    s3(moto)
    inputs = [f"{folder}/raw/set/f.txt", "s3://raw/set/b.jsonl.zst", f"{moto.endpoint}/raw/set/a.parquet"]
    plan = resolve(SPEC, inputs)
    assert names(plan) == ["https/a.parquet", "local/f.txt", "s3/b.jsonl.zst"]
    assert read_on(plan).documents == [*texts[:60], texts[239], *texts[60:120]]


@pytest.mark.parametrize("server", ["moto", "plain_web"])
def test_addresses_are_read_as_their_local_copies(server, request, folder, texts):
    found = request.getfixturevalue(server)
    top = f"{found.endpoint}/raw/set" if server == "moto" else f"{found.endpoint}/set"
    plan = resolve(SPEC, [f"{top}/{name.replace(' ', '%20')}" for name in FILES])
    assert names(plan) == [*FILES]
    reading = read_on(plan)
    assert reading.documents == texts
    for count in (1, 60, 130, 200, 240):
        assert read_on(plan, reading.cursors[count - 1]).documents == texts[count:]
    again = resolve(SPEC, [f"{top}/{name.replace(' ', '%20')}?signature={name}" for name in FILES])
    assert again.fingerprints() == plan.fingerprints()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "web"])
@pytest.mark.parametrize("seed", range(4))
def test_documents_are_the_same_through_a_storm_of_faults(kind, seed, moto, texts, s3, proxy, monkeypatch):
    monkeypatch.setattr("genesis.sources.ranges.WINDOW_BYTES", 3_000)
    monkeypatch.setattr(parquet, "_REMOTE_BUFFER_BYTES", 2_000)
    quick = (Fault.ERROR_500, Fault.SLOW_DOWN, Fault.CUT_BEFORE, Fault.LOST_ACK, Fault.SHORT_BODY, Fault.CUT_BODY)
    between = proxy(moto.port, seed=seed, rate=0.3, faults=quick)
    s3(moto, between.port)
    top = "s3://raw/set" if kind == "s3" else f"http://127.0.0.1:{between.port}/raw/set"
    plan = resolve(SPEC, [top] if kind == "s3" else [f"{top}/{name.replace(' ', '%20')}" for name in FILES])
    assert read_on(plan).documents == texts
    assert sum(between.injected.values()) > 5


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_a_file_that_is_replaced_is_refused_during_a_run_and_between_two(kind, moto, s3):
    s3(moto)
    client = s3_client(moto)
    client.put_object(ACL="public-read", Bucket="raw", Key="changing/a.txt", Body=b"first")
    text = "s3://raw/changing/a.txt" if kind == "s3" else f"{moto.endpoint}/raw/changing/a.txt"
    plan = resolve(SPEC, [text])
    assert read_on(plan).documents == [b"first"]
    client.put_object(ACL="public-read", Bucket="raw", Key="changing/a.txt", Body=b"other")
    with pytest.raises(InputChangedError, match=r"a\.txt.*replaced"):
        read_on(plan)
    assert resolve(SPEC, [text]).fingerprint("a.txt") != plan.fingerprint("a.txt")
    client.delete_object(Bucket="raw", Key="changing/a.txt")
    client.close()
    with pytest.raises(SourceError, match=r"a\.txt"):
        read_on(plan)


def test_only_the_text_columns_ranges_travel(moto, s3, proxy):
    s3(moto)
    source = random.Random(5)
    ballast = pa.array([source.randbytes(2000).hex() for _ in range(300)])
    table = pa.table({"ballast": ballast, "text": [f"text {n}" for n in range(300)], "more": ballast})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=100)
    client = s3_client(moto)
    client.put_object(ACL="public-read", Bucket="raw", Key="wide/a.parquet", Body=sink.getvalue().to_pybytes())
    client.close()
    for text in ("s3://raw/wide/a.parquet", f"{moto.endpoint}/raw/wide/a.parquet"):
        received: list[int] = []
        plan = resolve(SPEC, [text])
        with pytest.MonkeyPatch.context() as patch:
            append = buckets.PartDownload.append

            def counting(part, chunk, append=append, received=received):
                received.append(len(chunk))
                append(part, chunk)

            patch.setattr(buckets.PartDownload, "append", counting)
            assert len(read_on(plan).documents) == 300
        assert sum(received) < plan.size_bytes / 8


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/raw/nothing.csv", "there is none|access refused"),
        ("/raw/*.csv", "cannot be listed"),
        ("/raw/", "cannot be listed"),
        ("/raw/set/a.pdf", "expected a file of one of"),
    ],
)
def test_addresses_that_name_no_file_are_one_line(moto, path, message):
    with pytest.raises(SourceError, match=message) as failure:
        resolve(SPEC, [f"http://me:secret@127.0.0.1:{moto.port}{path}?signature=abc"])
    for secret in ("secret", "abc", "\n"):
        assert secret not in str(failure.value)


def test_a_server_without_ranges_or_permission_is_one_line(proxy, moto):
    def answered(reply: Reply) -> str:
        between = proxy(moto.port, answer=lambda request: reply)
        with pytest.raises(SourceError) as failure:
            resolve(SPEC, [f"http://127.0.0.1:{between.port}/raw/set/f.txt?signature=abc"])
        assert "abc" not in str(failure.value)
        return str(failure.value)

    assert "does not serve ranges" in answered(Reply(200, b"whole file"))
    assert "access refused (403)" in answered(Reply(403, b""))
    assert "Content-Encoding" in answered(
        Reply(206, b"x", (("Content-Range", "bytes 0-0/9"), ("Content-Encoding", "gzip")))
    )


def test_a_host_that_is_not_there_is_given_up_soon():
    with pytest.raises(SourceError, match="cannot connect"):
        resolve(SPEC, ["http://127.0.0.1:1/x.csv"])
    with pytest.raises(SourceError, match="expected an address"):
        resolve(SPEC, ["http://[/x.csv"])


def test_a_signed_address_is_read_and_a_fresh_signature_is_the_same_input(moto, texts):
    client = s3_client(moto)
    signed = [
        client.generate_presigned_url("get_object", Params={"Bucket": "raw", "Key": "set/f.txt"}, ExpiresIn=expires_s)
        for expires_s in (600, 700)
    ]
    client.close()
    first, second = (resolve(SPEC, [address]) for address in signed)
    assert read_on(first).documents == texts[239:]
    assert signed[0] != signed[1]
    assert first.fingerprints() == second.fingerprints()


def test_what_a_web_server_does_not_have_is_said(plain_web):
    with pytest.raises(InputNotFoundError, match=r"nothing\.csv: there is none \(404\)"):
        resolve(SPEC, [f"{plain_web.endpoint}/set/nothing.csv"])


def test_an_empty_file_is_read_from_anywhere(moto, s3):
    s3(moto)
    client = s3_client(moto)
    client.put_object(ACL="public-read", Bucket="raw", Key="empty/a.jsonl", Body=b"")
    client.close()
    for text in ("s3://raw/empty/a.jsonl", f"{moto.endpoint}/raw/empty/a.jsonl"):
        assert list(tasks(resolve(SPEC, [text]))) == []
