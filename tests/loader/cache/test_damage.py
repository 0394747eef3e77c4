"""Whatever was done to a cached file, what is opened is right, and the damage is told."""

import os
import socket

import pytest

from loader.cache import ShardCache
from loader.errors import LoaderUsageError
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of

NAME = name_of(1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[12_345] ^= 4
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, SIZE_BYTES - 1)


def lengthen(path):
    os.truncate(path, SIZE_BYTES + 1)


def empty(path):
    os.truncate(path, 0)


def link_elsewhere(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def dangling_link(path):
    path.unlink()
    path.symlink_to(path.parent.parent / "nowhere")


def folder_instead(path):
    path.unlink()
    path.mkdir()


def pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


def socket_instead(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))


DAMAGES = [
    flip, truncate, lengthen, empty, link_elsewhere, dangling_link, folder_instead, pipe_instead, socket_instead,
]  # fmt: skip


@pytest.fixture
def filled(folder):
    cache = ShardCache(folder, 10 * SIZE_BYTES, wait_timeout_s=10)
    cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    return cache


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_removed_and_made_anew(filled, folder, caplog, damage):
    damage(folder / NAME)
    found = filled.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.from_cache, found.cached, bytes(found.buffer)) == (False, True, content(NAME))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NAME in caplog.text
    assert (folder / NAME).is_file() and not (folder / NAME).is_symlink()
    assert filled.open(NAME, SIZE_BYTES, lambda: b"", check(NAME)).from_cache
    if damage is link_elsewhere:
        assert (folder.parent / "elsewhere").read_bytes() == content(NAME)


def test_a_folder_with_something_in_it_is_left_alone(filled, folder, caplog):
    folder_instead(folder / NAME)
    (folder / NAME / "mine").write_text("mine")
    found = filled.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.cached, bytes(found.buffer)) == (False, content(NAME))
    assert (folder / NAME / "mine").read_text() == "mine"
    assert "Directory not empty" in caplog.text


def test_a_link_where_a_file_would_be_made_is_not_written_through(folder, tmp_path, caplog):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder.mkdir()
    (folder / f".{NAME}.part").symlink_to(precious)
    found = ShardCache(folder, SIZE_BYTES).open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.cached, bytes(found.buffer)) == (False, content(NAME))
    assert precious.read_text() == "precious"
    assert "symbolic links" in caplog.text


def test_the_leftover_of_another_size_is_taken_over(folder):
    folder.mkdir()
    (folder / f".{NAME}.part").write_bytes(b"x" * (3 * SIZE_BYTES))
    found = ShardCache(folder, SIZE_BYTES).open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert found.cached and found.buffer == content(NAME)
    assert (folder / NAME).read_bytes() == content(NAME)


def test_another_error_of_the_check_is_the_callers(filled):
    def check_fails(view):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        filled.open(NAME, SIZE_BYTES, lambda: b"", check_fails)
    assert filled.contains(NAME)


def test_a_damaged_file_that_is_open_elsewhere_stays_readable_there(filled, folder, caplog):
    other = name_of(2)
    reader = filled.open(other, SIZE_BYTES, lambda: content(other), check(other))
    found = filled.open(other, SIZE_BYTES + 1, lambda: content(other, SIZE_BYTES + 1), check(other))
    assert found.cached and not found.from_cache
    assert reader.buffer == content(other)
    assert other in caplog.text


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x-0123456789abcdef.pt", "/x-0123456789abcdef.pt", "x.pt", ".x-0123456789abcdef.pt",
     "x-0123456789ABCDEF.pt", "x-0123456789abcdef.pt\n", "x-0123456789abcdef.pt.part",
     "x" * 300 + "-0123456789abcdef.pt"],
)  # fmt: skip
def test_a_name_that_is_not_one_is_refused(filled, name):
    for use in (filled.contains, filled.discard, lambda name: filled.open(name, 1, bytes, lambda view: None)):
        with pytest.raises(LoaderUsageError, match="expected a cache name"):
            use(name)


def test_an_empty_file_is_refused(filled):
    with pytest.raises(LoaderUsageError, match="at least 1 byte"):
        filled.open(NAME, 0, bytes, lambda view: None)
