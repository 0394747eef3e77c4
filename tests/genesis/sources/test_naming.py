"""What a user may call a source."""

from __future__ import annotations

import pytest

from genesis.errors import UnknownSourceError, UsageError
from genesis.sources import SourceOptions, find_source
from manifests import SourcesFile, builtin_sources

SOURCES = builtin_sources()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("hf://HuggingFaceTB/cosmopedia", ("huggingfacetb-cosmopedia", "main", ())),
        ("hf://HuggingFaceTB/cosmopedia/", ("huggingfacetb-cosmopedia", "main", ())),
        ("hf://a/B_c.d/data/*.parquet", ("a-b_c.d", "main", ("data/*.parquet",))),
        ("hf://a/b/data/*.parquet@v1.0", ("a-b", "v1.0", ("data/*.parquet",))),
        ("hf://a/b/default@refs/convert/parquet", ("a-b", "refs/convert/parquet", ("default/**",))),
        ("hf://a/b@v1", ("a-b", "v1", ())),
        ("hf://datasets/a/b@refs/convert/parquet/x/*.parquet", ("a-b", "refs/convert/parquet", ("x/*.parquet",))),
        ("hf://datasets/a/b@feature%2Fx/c.csv", ("a-b", "feature/x", ("c.csv",))),
        ("hf://datasets/b", ("datasets-b", "main", ())),
        ("hf://a/b/folder", ("a-b", "main", ("folder/**",))),
        (f"hf://{'A' * 60}/name", ("a" * 60 + "-nam", "main", ())),
    ],
)
def test_any_data_set_of_the_hub_has_an_address(address, expected):
    spec = find_source(address, SOURCES)
    assert (spec.name, spec.revision, spec.data_files) == expected
    assert spec.target_shards == 0
    assert spec.text_field == "text"


@pytest.mark.parametrize("address", ["hf://", "hf://name", "hf://a/b@", "hf://a/b@x/y@z", "hf://a b/c", "hf:///a/b"])
def test_an_address_that_is_none_is_said_to_be_none(address):
    with pytest.raises(UsageError, match=r"expected hf://owner/name\[/pattern\]\[@revision\]"):
        find_source(address, SOURCES)


def test_options_say_how_it_is_read_and_what_it_is_called():
    options = SourceOptions(text_field="body", include=("*.x",), exclude=("y*",))
    spec = find_source("hf://a/b", SOURCES, options)
    assert (spec.name, spec.text_field, spec.include, spec.exclude) == ("a-b", "body", ("*.x",), ("y*",))
    assert find_source("hf://a/b", SOURCES, SourceOptions(hf_name="En 1")).name == "a-b-en-1"
    assert find_source("hf://a/b", SOURCES, SourceOptions(hf_name="x", name="mine")).name == "mine"
    known = find_source("fineweb-edu", SOURCES, SourceOptions(hf_name="other"))
    assert (known.name, known.data_files, known.merges) == ("fineweb-edu", (), 2527)
    assert find_source("c4", SOURCES) == SOURCES.get("c4")


def test_filters_of_the_file_and_of_the_command_line_are_added_up():
    sources = SourcesFile.from_json(b'{"sources": [{"name": "mine", "include": ["a*"], "exclude": ["b*"]}]}')
    spec = find_source("mine", sources, SourceOptions(exclude=("c*",)))
    assert (spec.include, spec.exclude) == (("a*",), ("b*", "c*"))


@pytest.mark.parametrize(("name", "near"), [("fineweb-edo", "fineweb-edu"), ("slimpyjama", "slimpajama"), ("C4", "c4")])
def test_a_name_that_is_nearly_known_is_asked_about(name, near):
    for inputs in ((), ("x.jsonl",)):
        with pytest.raises(
            UnknownSourceError, match=f"no source is named {name!r}: did you mean {near!r}\\? known: c4"
        ):
            find_source(name, SOURCES, inputs=inputs)


def test_a_new_name_is_a_source_where_files_are_given():
    with pytest.raises(UnknownSourceError, match=r"no source is named 'mine'; known: c4.*hf://owner/name"):
        find_source("mine", SOURCES)
    assert find_source("mine", SOURCES, inputs=("x.jsonl",)).name == "mine"
    assert find_source("fineweb2", SOURCES, SourceOptions(name="fineweb2"), inputs=("x",)).name == "fineweb2"


@pytest.mark.parametrize(
    ("text", "options", "inputs"),
    [
        ("hf://a/b/c.csv", {"hf_name": "x"}, ()),
        ("mine", {"hf_name": "x"}, ("a.csv",)),
        ("hf://a/b", {"name": "Big Name"}, ()),
        ("hf://a/b", {"name": "manifest"}, ()),
        ("UPPER", {}, ("a.csv",)),
        ("python-docs", {"name": "docs"}, ()),
    ],
)
def test_options_that_make_no_sense_are_refused(text, options, inputs):
    with pytest.raises(UsageError, match="--"):
        find_source(text, SOURCES, SourceOptions(**options), inputs=inputs)
