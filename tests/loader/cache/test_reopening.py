"""A file that a process has verified is hashed again only if it is another one since."""

from __future__ import annotations

import os

from loader.cache import ShardCache
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of


def test_a_file_is_checked_again_only_when_it_was_touched(tmp_path):
    name = name_of(1)
    checked = []

    def open_it(cache):
        file = cache.open(
            name, SIZE_BYTES, lambda: content(name), lambda view: (checked.append(len(view)), check(name)(view))[1]
        )
        assert bytes(file.buffer) == content(name)
        return file.from_cache

    first = ShardCache(tmp_path / "cache", 10 * SIZE_BYTES)
    assert not open_it(first)
    assert open_it(first) and len(checked) == 1  # What was written is read back once.
    assert open_it(first) and len(checked) == 1
    assert open_it(ShardCache(tmp_path / "cache", 10 * SIZE_BYTES)) and len(checked) == 2  # Another reader's own check.
    assert open_it(first) and len(checked) == 2  # Which is no change of the file.
    damaged = bytearray(content(name))
    damaged[SIZE_BYTES // 2] ^= 1
    (tmp_path / "cache" / name).write_bytes(damaged)
    assert not open_it(first) and len(checked) == 3  # Written to in place: noticed, made anew.
    replacement = tmp_path / "cache" / "x"
    replacement.write_bytes(damaged)
    os.utime(replacement, ns=(0, (tmp_path / "cache" / name).stat().st_mtime_ns))
    replacement.replace(tmp_path / "cache" / name)
    assert not open_it(first)  # Another file of the same age and size.
