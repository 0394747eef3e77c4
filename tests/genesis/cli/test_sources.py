"""``genesis sources check``: one row of a source, and what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genesis.cli.app import run
from tests.support.hub_server import COMMIT, hub_server
from tests.support.populating import genesis


def check(capsys: pytest.CaptureFixture[str], *arguments: str | Path, expect: int = 0) -> dict[str, object]:
    code = run(["sources", "check", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code == expect, captured.err
    found = json.loads(captured.out)
    assert captured.err == (f"genesis: {found['problem']}\n" if expect else "")
    return found


def test_a_row_is_read_and_told(tmp_path, capsys):
    rows = [{"text": ""}, {"text": None}, {"text": "ünï\x1b[2J\n" + "x" * 900}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "c.csv").write_text("text\n")
    found = check(capsys, "mine", "--input", tmp_path)
    assert found["formats"] == {"csv": 2, "json-lines": 1}
    assert (found["files"], found["first_file"], found["problem"], found["fields"]) == (3, "a.csv", None, [])
    document = found["document"]
    assert (document["file"], document["row"], document["size_bytes"]) == ("b.jsonl", 2, 910)
    assert document["beginning"].startswith("ünï\x1b[2J\nxxx")
    assert run(["sources", "check", "mine", "--input", str(tmp_path), "--exclude", "*.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine: files"
    assert "1 json-lines" in lines[1]
    assert "row 2 of b.jsonl: 910 B" in lines[2]
    assert "\x1b" not in lines[3]
    assert lines[3].endswith("x…")


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl", "a.json"])
def test_a_missing_field_is_told_with_those_there_are(tmp_path, capsys, name):
    rows = [{"body": "the text", "title": "a"}]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name.endswith("csv"):
        (tmp_path / name).write_text("body,title\nthe text,a\n")
    else:
        (tmp_path / name).write_text(json.dumps(rows if name.endswith("json") else rows[0]))
    found = check(capsys, "mine", "--input", tmp_path, expect=1)
    assert found["fields"] == ["body", "title"]
    assert found["document"] is None
    assert "--text-field" in str(found["problem"])
    found = check(capsys, "mine", "--input", tmp_path, "--text-field", "body")
    assert found["document"]["beginning"] == "the text"


def test_broken_input_and_input_without_text_end_with_one(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("no json\n")
    assert "line 1 is not a JSON object" in str(check(capsys, "mine", "--input", tmp_path, expect=1)["problem"])
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    assert "no document" in str(check(capsys, "mine", "--input", tmp_path, expect=1)["problem"])
    assert run(["sources", "check", "mine", "--input", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("genesis: --input")


@pytest.mark.slow
def test_any_data_set_of_the_hub_is_looked_into(tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"body": ["first", "second"]}), tmp_path / "data" / "p.parquet")
    with hub_server(tmp_path) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
        arguments = ["sources", "check", "hf://someone/texts", "--text-field", "body"]
        done = genesis(*arguments, "--json", **environment)
        found = json.loads(done.stdout)
        assert (found["source"], found["hf_path"], found["revision"]) == ("someone-texts", "someone/texts", COMMIT)
        assert found["document"] == {
            "file": "data/p.parquet", "row": 0, "row_group": 0, "size_bytes": 5, "beginning": "first"
        }  # fmt: skip
        done = genesis(*arguments[:-2], expect=1, **environment)
        assert "fields body" in done.stdout
        assert "no column 'text'" in done.stderr
