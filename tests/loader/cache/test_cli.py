"""``genesis cache``, as its user sees it."""

import json

import pytest

from genesis.cli.app import run
from loader import ManifestRollbackError
from loader.cache import ShardCache
from loader.cache.part import touch
from loader.cache.settings import format_size
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
    assert not folder.exists()
