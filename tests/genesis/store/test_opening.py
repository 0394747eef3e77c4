"""From an address to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from genesis.errors import UsageError
from genesis.store import FolderStore, open_readable, open_store
from genesis.store.http import HttpStore
from genesis.store.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("/data/store", FolderStore, "/data/store"),
        (Path("/data/store"), FolderStore, "/data/store"),
        ("file:///data/a%20b", FolderStore, "/data/a b"),
        ("file://localhost/data", FolderStore, "/data"),
        ("s3://bucket", S3Store, "s3://bucket"),
        ("s3://bucket/", S3Store, "s3://bucket"),
        ("S3://bucket/pre/fix/", S3Store, "s3://bucket/pre/fix"),
    ],
)
def test_open_store(url, kind, shown):
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.url == shown


def test_relative_and_home_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert open_store("store").url == str(tmp_path / "store")
    assert open_store("~/store").url == "/home/someone/store"


@pytest.mark.parametrize("url", ["https://host/prefix", "http://user:secret@host:8080/prefix/", "s3://bucket", "/data"])
def test_open_readable(url):
    store = open_readable(url)
    try:
        assert isinstance(store, HttpStore) == url.startswith("http")
        assert "secret" not in store.url + repr(store)
    finally:
        store.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/x", "s3://bucket/prefix"),
        ("ftp://host/x", "file:///path"),
        ("https://host/x", "can only be read"),
        ("file://otherhost/x", "names no other host"),
        ("s3://", "s3://bucket/prefix"),
        ("s3://bucket/../x", "s3://bucket/prefix"),
        ("s3://bucket/a?b=c", "s3://bucket/prefix"),
        ("s3://bucket/a b", "s3://bucket/prefix"),
        ("", "empty"),
    ],
)
def test_what_cannot_be_written(url, says):
    with pytest.raises(UsageError, match=says):
        open_store(url)


@pytest.mark.parametrize("url", ["gs://bucket/x", "https://", "https://host/x?token=1", "https://u:secret@host/?x"])
def test_what_cannot_be_read(url):
    with pytest.raises(UsageError) as caught:
        open_readable(url)
    assert "secret" not in str(caught.value)
