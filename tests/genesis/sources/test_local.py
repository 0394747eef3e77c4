"""Local files in one order, the patterns of sources.json, and the corpus's real text where it is there."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import InputChangedError, InputNotFoundError, SourceError
from genesis.sources import PYTHON_DOCS, resolve, tasks
from genesis.sources.base import fixed_folder, matches, natural_key
from genesis.sources.opening import format_of
from manifests import SourceSpec, builtin_sources
from tests.support.documents import read_on

SPEC = SourceSpec(name="mine")


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "{name}"}}\n')


def names(spec: SourceSpec, *inputs: object) -> list[str]:
    return [file.name for file in resolve(spec, [str(text) for text in inputs]).files]


def test_a_glob_its_expansion_and_the_folder_are_the_same_plan(tmp_path, monkeypatch):
    write(tmp_path, "chunk_2.jsonl", "chunk_10.jsonl", "chunk_1.jsonl")
    plan = resolve(SPEC, [f"{tmp_path}/chunk_*.jsonl"])
    assert [file.name for file in plan.files] == ["chunk_1.jsonl", "chunk_2.jsonl", "chunk_10.jsonl"]
    assert resolve(SPEC, [str(path) for path in tmp_path.iterdir()]) == plan
    assert resolve(SPEC, [str(tmp_path)]) == plan
    assert resolve(SPEC, [str(tmp_path), f"{tmp_path}/*.jsonl", f"{tmp_path}/chunk_1.jsonl"]) == plan
    monkeypatch.chdir(tmp_path)
    assert resolve(SPEC, ["*.jsonl"]) == plan
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(SPEC, ["~/chunk_*.jsonl"]) == plan


def test_names_do_not_depend_on_where_the_data_lies(tmp_path):
    write(tmp_path / "one", "a/x.jsonl", "b/x.jsonl")
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "deeper")
    first, second = resolve(SPEC, [f"{tmp_path}/one/**"]), resolve(SPEC, [f"{tmp_path}/two/deeper"])
    assert [file.name for file in first.files] == ["a/x.jsonl", "b/x.jsonl"]
    assert first.fingerprint("b/x.jsonl") == second.fingerprint("b/x.jsonl")


def test_a_name_with_brackets_is_taken_as_it_is(tmp_path):
    write(tmp_path, "part[1].jsonl", "part1.jsonl")
    assert names(SPEC, tmp_path / "part[1].jsonl") == ["part[1].jsonl"]


def test_a_folder_leaves_out_hidden_files_and_what_is_not_text(tmp_path):
    write(tmp_path, "a.jsonl", "b.pdf", ".hidden.jsonl", ".git/x.txt", "below/c.txt", "below/readme.txt", "README.md")
    assert names(SPEC, tmp_path) == ["a.jsonl", "below/c.txt"]
    assert names(SPEC, tmp_path / "b*low") == ["c.txt"]


@pytest.mark.parametrize(
    ("inputs", "include", "expected"),
    [
        (["", "README.md"], (), ["README.md", "a.jsonl", "below/c.txt"]),
        (["README*"], (), ["README.md", "README.txt"]),
        (["**/*.md"], (), ["README.md", "below/notes.md"]),
        (["*.jsonl", ".*.jsonl"], (), [".hidden.jsonl", "a.jsonl"]),
        ([".hidden.jsonl"], (), [".hidden.jsonl"]),
        (["**"], (), ["a.jsonl", "below/c.txt"]),
        ([""], ("*.md",), ["README.md", "below/notes.md"]),
        ([""], ("readme*", "README*"), ["README.md", "README.txt"]),
        ([""], ("*.jsonl",), ["a.jsonl"]),
        ([""], ("*.jsonl", ".*"), [".hidden.jsonl", "a.jsonl"]),
    ],
)
def test_what_is_left_out_is_read_when_it_is_asked_for(tmp_path, inputs, include, expected):
    write(tmp_path, "a.jsonl", ".hidden.jsonl", "below/c.txt", "below/notes.md", "README.md", "README.txt")
    spec = SPEC.model_copy(update={"include": include})
    assert names(spec, *(tmp_path / text for text in inputs)) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (("*.jsonl",), (), ["1.jsonl", "2.jsonl", "new/3.jsonl", "old/0.jsonl"]),
        ((), ("old/*",), ["1.jsonl", "2.jsonl", "4.txt", "new/3.jsonl"]),
        (("new/*", "[12].*"), ("2.*",), ["1.jsonl", "new/3.jsonl"]),
        ((), ("*.pdf", "*/*"), ["1.jsonl", "2.jsonl", "4.txt"]),
    ],
)
def test_filters_look_at_names_below_the_input_and_at_the_last_part(tmp_path, include, exclude, expected):
    write(tmp_path, "1.jsonl", "2.jsonl", "old/0.jsonl", "new/3.jsonl", "4.txt", "5.pdf")
    spec = SPEC.model_copy(update={"include": include, "exclude": exclude})
    assert names(spec, tmp_path) == expected


def test_filters_change_no_name_and_what_they_change_later_is_no_change_of_what_was_read(tmp_path):
    write(tmp_path, "data/1.jsonl", "data/2.jsonl", "data/3.jsonl", "other/4.jsonl")
    plan = resolve(SPEC, [str(tmp_path)])
    cursor = read_on(plan).cursors[1]
    later = resolve(SPEC.model_copy(update={"exclude": ("other/*", "3.*")}), [str(tmp_path)])
    assert [file.name for file in later.files] == ["data/1.jsonl", "data/2.jsonl"]
    assert later.fingerprint(cursor.file) == plan.fingerprint(cursor.file)
    earlier = resolve(SPEC.model_copy(update={"exclude": ("1.*",)}), [str(tmp_path)])
    assert earlier.fingerprint(cursor.file) != plan.fingerprint(cursor.file)


def test_filters_that_leave_nothing_and_files_that_are_left_out_are_named(tmp_path):
    write(tmp_path, "a.jsonl", "docs/README.md", "docs/b.md")
    with pytest.raises(InputNotFoundError, match=r"--include '\*\.csv' leaves none of 1 input files"):
        resolve(SPEC.model_copy(update={"include": ("*.csv",)}), [str(tmp_path)])
    with pytest.raises(InputNotFoundError, match=r"2 README, \.md or hidden files only.*--include '\*\.md'"):
        resolve(SPEC, [str(tmp_path / "docs")])
    assert names(SPEC.model_copy(update={"exclude": ("README*", "docs/*")}), tmp_path / "*") == ["a.jsonl"]


def test_what_matches_nothing_or_is_not_read_is_named(tmp_path):
    write(tmp_path, "a.jsonl", "empty/x.pdf")
    for text in (f"{tmp_path}/*.parquet", f"{tmp_path}/b.jsonl", f"{tmp_path}/none/*.jsonl"):
        with pytest.raises(InputNotFoundError, match=text.replace("*", r"\*")):
            resolve(SPEC, [f"{tmp_path}/a.jsonl", text])
    with pytest.raises(InputNotFoundError, match="empty"):
        resolve(SPEC, [f"{tmp_path}/empty"])
    write(tmp_path, "table.pdf")
    for text in (f"{tmp_path}/table.pdf", f"{tmp_path}/t*"):
        with pytest.raises(SourceError, match=r"table\.pdf.*\.parquet, \.jsonl.*'\.pdf'.*--exclude"):
            resolve(SPEC, [text])


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    write(tmp_path, "a.jsonl")
    plan = resolve(SPEC, [str(tmp_path)])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputNotFoundError, match=r"a\.jsonl.*is gone"):
        list(tasks(plan))


def test_files_may_be_added_behind_but_not_changed_or_removed(tmp_path):
    write(tmp_path, "1.jsonl", "2.jsonl")
    before = resolve(SPEC, [str(tmp_path)])
    reading = read_on(before)
    write(tmp_path, "3.jsonl")
    longer = resolve(SPEC, [str(tmp_path)])
    assert longer.fingerprint("2.jsonl") == before.fingerprint("2.jsonl")
    assert read_on(longer, reading.cursors[-1]).documents == [b"3.jsonl"]
    (tmp_path / "1.jsonl").write_text('{"text": "other  "}\n')
    changed = resolve(SPEC, [str(tmp_path)])
    assert changed.files[0].size_bytes == before.files[0].size_bytes
    assert changed.fingerprint("2.jsonl") != before.fingerprint("2.jsonl")
    (tmp_path / "2.jsonl").unlink()
    shorter = resolve(SPEC, [str(tmp_path)])
    with pytest.raises(InputChangedError, match=r"'2\.jsonl'"):
        shorter.fingerprint("2.jsonl")
    with pytest.raises(InputChangedError, match=r"'2\.jsonl'"):
        list(tasks(shorter, reading.cursors[-1]))


def test_a_change_at_either_end_of_a_large_file_is_seen(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 300_000)
    digests = [resolve(SPEC, [str(path)]).files[0].digest]
    for data in (b"y" + b"x" * 299_999, b"x" * 299_999 + b"y", b"x" * 300_001):
        path.write_bytes(data)
        digests.append(resolve(SPEC, [str(path)]).files[0].digest)
    assert len(set(digests)) == 4


def test_python_docs_is_the_standard_library_in_a_fixed_order():
    plan = resolve(PYTHON_DOCS)
    assert plan == resolve(PYTHON_DOCS)
    found = [file.name for file in plan.files]
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= set(found)
    assert not [name for name in found if "site-packages" in name or "/test/" in f"/{name}"]
    reading = read_on(plan)
    library = Path(plan.files[0].location.removesuffix(plan.files[0].name))
    assert (library / "json" / "decoder.py").read_bytes() in reading.documents
    assert sum(map(len, reading.documents)) > 5_000_000
    assert read_on(plan, reading.cursors[99]).documents == reading.documents[100:]


def test_patterns_and_the_order_of_names():
    names = [
        "train/chunk1/example_train_2.jsonl.zst",
        "train/chunk1/example_train_10.jsonl.zst",
        "train/chunk2/example_train_1.jsonl.zst",
        "train/chunk10/example_train_0.jsonl.zst",
        "train-extra/0.jsonl.zst",
    ]
    shuffled = random.Random(3).sample(names, len(names))
    assert sorted(shuffled, key=natural_key) == names
    assert not matches("data/a/b.parquet", "data/*.parquet")
    assert matches("data/a/b.parquet", "data/**/*.parquet")
    assert matches("data/b.parquet", "data/**/*.parquet")
    assert matches("a/b/c.txt", "**")
    assert fixed_folder("train/chunk*/*.jsonl.zst") == "train"
    assert fixed_folder("sample/10BT/*.parquet") == "sample/10BT"
    assert fixed_folder("*.jsonl") == ""


@given(st.lists(st.text(alphabet="ab01²/.-_", min_size=1, max_size=8), unique=True))
def test_every_two_names_have_one_order(names):
    ordered, backwards = sorted(names, key=natural_key), names[::-1]
    assert sorted(backwards, key=natural_key) == ordered
    assert len({natural_key(name) for name in names}) == len(names)


KNOWN = {
    "fineweb-edu": (
        ["sample/10BT/000_00000.parquet"],
        ["sample/100BT/000_00000.parquet", "data/CC-MAIN-2024-10/a.parquet"],
    ),
    "slimpajama": (
        ["train/chunk1/example_train_0.jsonl.zst", "train/chunk10/example_train_5910.jsonl.zst"],
        ["validation/chunk1/example_holdout_0.jsonl.zst", "test/chunk1/example_holdout_0.jsonl.zst"],
    ),
    "c4": (
        ["en/c4-train.00000-of-01024.json.gz"],
        ["en/c4-validation.00000-of-00008.json.gz", "en.noblocklist/c4-train.00000-of-01024.json.gz"],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_patterns_take_the_training_files_and_no_others(name):
    spec = builtin_sources().get(name)
    assert spec is not None
    taken, left = KNOWN[name]
    for path in taken:
        assert sum(matches(path, pattern) for pattern in spec.data_files) == 1
        assert format_of(path) is not None
    for path in left:
        assert not any(matches(path, pattern) for pattern in spec.data_files)


def test_a_pipe_in_a_folder_is_no_document_and_a_name_that_is_not_unicode_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    os.mkfifo(tmp_path / "f.jsonl")
    assert [file.name for file in resolve(SourceSpec(name="s", text_field="text"), [str(tmp_path)]).files] == [
        "a.jsonl"
    ]
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("")
    with pytest.raises(SourceError, match="expected a name in UTF-8"):
        resolve(SourceSpec(name="s", text_field="text"), [str(tmp_path)])
