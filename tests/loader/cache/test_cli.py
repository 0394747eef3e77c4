"""``genesis cache``, as its user sees it."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.cli.app import run
from loader import ManifestRollbackError
from loader.cache import ShardCache, cache_bytes, cache_dir, format_size, parse_size
from loader.cache.part import touch
from loader.errors import LoaderUsageError
from loader.options import StoreOptions
from loader.session import Session
from manifests import MANIFEST_KEY
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of
from tests.support.populating import genesis
from tests.support.token_store import TokenStore


@pytest.fixture
def cache(folder, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(folder))
    monkeypatch.setenv("GENESIS_CACHE_BYTES", "1MB")
    return ShardCache(folder, 1_000_000)


def fill(cache, *numbers):
    return [
        cache.open(name_of(number), SIZE_BYTES, lambda n=number: content(name_of(n)), check(name_of(number)))
        for number in numbers
    ]


def test_ls_shows_what_is_there_and_how_much_of_the_bound(cache, folder, capsys):
    first, _ = fill(cache, 1, 2)
    del _
    part = folder / f".{name_of(3)}.part"
    part.write_bytes(b"left by a dead process")
    touch(part)  # The stamp of a write may be some milliseconds old, and seem to come before the files above.
    assert run(["cache", "ls"]) == 0
    *files, total = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in files] == [name_of(1), name_of(2), f".{name_of(3)}.part"]
    assert [line.endswith("in use") for line in files] == [True, False, False]
    assert files[0].split()[1:3] == ["40.0", "kB"] and files[2].endswith("leftover")
    assert total == f"{folder}: 3 files, 80.0 kB of at most 1.0 MB"
    assert first.buffer == content(name_of(1))


def test_ls_for_programs(cache, folder, capsys):
    fill(cache, 1)
    assert run(["cache", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [file] = found.pop("files")
    assert found == {"folder": str(folder), "max_bytes": 1_000_000, "total_bytes": SIZE_BYTES}
    assert file.pop("last_used_at") == cache.entries()[0].last_used_at.isoformat()
    assert file == {"name": name_of(1), "size_bytes": SIZE_BYTES, "in_use": False, "complete": True}


def test_clear_removes_what_is_closed_and_names_what_it_kept(cache, folder, capsys):
    held, _ = fill(cache, 1, 2)
    del _
    assert run(["cache", "clear"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"kept {name_of(1)}: a process has it open",
        f"{folder}: removed 1 file, 40.0 kB; kept 1",
    ]
    assert held.buffer == content(name_of(1))
    del held
    assert run(["cache", "clear", "--json", "--cache-dir", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(folder), "removed": [name_of(1)], "kept": [], "freed_bytes": SIZE_BYTES,
    }  # fmt: skip


def test_what_is_known_of_stores_is_shown_and_cleared_but_not_which_manifest_was_seen(cache, folder, tmp_path, capsys):
    store = TokenStore.of(tmp_path / "store", 2)
    old = (store.folder / MANIFEST_KEY).read_bytes()
    store.grow(1)

    def options(age_s: float = 600.0) -> StoreOptions:
        return StoreOptions((store.url,), cache_dir=folder, cache_bytes=1_000_000, manifest_max_age_s=age_s)

    Session.open(options()).open_shard(0)
    [known] = (folder / "stores").iterdir()
    index_bytes = sum(path.stat().st_size for path in known.iterdir() if path.name != MANIFEST_KEY)
    assert run(["cache", "ls"]) == 0
    assert f"{format_size(index_bytes)} beside them: the index of a store" in capsys.readouterr().out
    assert run(["cache", "clear"]) == 0
    assert [path.name for path in known.iterdir()] == [MANIFEST_KEY]
    capsys.readouterr()
    assert run(["cache", "ls"]) == 0
    assert "beside them" not in capsys.readouterr().out
    store.put(MANIFEST_KEY, old)
    with pytest.raises(ManifestRollbackError):
        Session.open(options(0.0)).newest_catalog()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment", "code"),
    [
        (["--cache-dir", "/dev/null"], {}, 1),
        ([], {"GENESIS_CACHE_BYTES": "much"}, 2),
        ([], {"GENESIS_CACHE_DIR": "~nobody-of-this-name/cache"}, 2),
    ],
)
def test_what_a_user_can_mend_ends_with_one_line(arguments, environment, code):
    done = genesis("cache", "ls", *arguments, expect=code, **environment)
    assert done.stdout == ""
    assert done.stderr.startswith("genesis: expected" if code == 2 else "genesis: cache /dev/null: cannot be used")
    assert len(done.stderr.splitlines()) == 1


def test_a_cache_that_is_not_there_is_empty(cache, folder, capsys):
    assert run(["cache", "ls"]) == 0
    assert run(["cache", "clear"]) == 0
    assert "0 files" in capsys.readouterr().out
    assert (cache.entries(), cache.clear().removed, cache.contains(name_of(1))) == ([], (), False)
    cache.discard(name_of(1))
    assert not folder.exists()


FACTORS = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
    "TiB": 2**40,
}  # fmt: skip


@given(st.integers(1, 10**6), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " "]), st.booleans())
def test_a_number_and_a_unit(number, unit, space, lower):
    text = f"{number}{space}{unit}"
    assert parse_size(text.lower() if lower else text) == number * FACTORS[unit]
    exact = {"0.1GB": 10**8, "1.5KiB": 1536, " 20GB ": 20 * 10**9, "7": 7}
    assert [parse_size(text) for text in exact] == [*exact.values()]


@pytest.mark.parametrize(
    "text", ["", "GB", "20G", "20 gigs", "-1GB", "0", "0.0001kB", "1e9", "٢GB", "9" * 20 + "GB", "1,000", "0x10", "nan"]
)
def test_everything_else_is_refused_with_what_was_found(text):
    with pytest.raises(LoaderUsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_gives_a_size_or_a_usage_error(text):
    with contextlib.suppress(LoaderUsageError):
        assert 1 <= parse_size(text) < 2**63


@given(st.integers(0, 10**18))
def test_what_is_shown_is_right_to_its_last_digit(size):
    shown = format_size(size)
    assert len(shown) <= 9
    if size:
        assert abs(parse_size(shown) - size) <= size * 0.051


def test_the_default_place_and_bound_and_what_overrides_them(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GENESIS_CACHE_DIR", raising=False)
    monkeypatch.delenv("GENESIS_CACHE_BYTES", raising=False)
    assert cache_dir() == tmp_path / ".neuroshard/data_cache"
    assert cache_bytes() == 20 * 10**9
    monkeypatch.setenv("GENESIS_CACHE_DIR", "/from/environment")
    monkeypatch.setenv("GENESIS_CACHE_BYTES", "1MiB")
    assert (str(cache_dir()), cache_bytes()) == ("/from/environment", 2**20)
    assert (str(cache_dir("/given")), cache_bytes("2kB"), cache_bytes(5)) == ("/given", 2000, 5)
    with pytest.raises(LoaderUsageError):
        cache_bytes(0)
