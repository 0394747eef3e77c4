"""From plain values (YAML, command line) to configuration dataclasses, and back.

An unknown name is an error that suggests the nearest known one; a value of the wrong type is an error that names the
field, what was expected and what was found. Two readings differ from YAML 1.1: ``3e-4`` is a number, and ``off`` is a
word, which a switch still reads as false. Missing names take the dataclass's defaults, and so do names that ``--set
name=`` (or ``name=null``) resets; in a file, a name without a value is an error.

A field with ``metadata=SECRET`` can be read in, but never comes out again, neither in `to_mapping` nor in a message.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from trainer.errors import TrainerUsageError

ConfigT = TypeVar("ConfigT")

_BOOL: Final = "tag:yaml.org,2002:bool"
_MOST_SAID: Final = 200
_RESET: Final = object()
"""Stands for a value that an override resets to its default."""
_ALIASES: Final = MappingProxyType({"outer.strategy": "strategy"})
"""Where people look for an option with ``--set``, and where it is."""
SECRET: Final = MappingProxyType({"secret": True})
"""Metadata of a dataclass field whose value must not be shown."""


class _Loader(yaml.SafeLoader):
    """Safe, and with true and false as the only spellings of truth values (YAML 1.2)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL or first in "tTfF"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def from_mapping(kind: type[ConfigT], values: Mapping[str, Any], where: str = "") -> ConfigT:
    """Builds a dataclass, and those in it, from nested mappings; ``where`` prefixes names in `TrainerUsageError`s."""
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"expected a dataclass, found {kind!r}")
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name in values:
        if name not in fields:
            raise TrainerUsageError(f"{where}{name}: there is no such option{_nearest(name, list(fields))}")
    arguments = {
        name: _value(hints[name], value, f"{where}{name}", secret="secret" in fields[name].metadata)
        for name, value in values.items()
        if value is not _RESET
    }
    try:
        return kind(**arguments)
    except TrainerUsageError as error:
        raise TrainerUsageError(_located(str(error), where)) from error


def _value(hint: Any, value: Any, where: str, *, secret: bool) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping | None):
            raise TrainerUsageError(f"{where}: expected a mapping of options, found {value!r}")
        return from_mapping(hint, value or {}, f"{where}.")
    if isinstance(value, Mapping):
        value = {name: item for name, item in value.items() if item is not _RESET}
    found = type(value).__name__ if secret else repr(value)[:80]
    if isinstance(value, bool) and hint in (int, float):
        raise TrainerUsageError(f"{where}: expected a number, found {found}")
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise TrainerUsageError(f"{where}: {message[0].lower()}{message[1:]}, found {found}") from error


def _located(message: str, where: str) -> str:
    """Prefixes a dataclass's message with the field's whole name, of which the message may have the end already."""
    section = where.rsplit(".", 2)[-2] + "." if "." in where else ""
    if message.startswith(where):
        return message
    return where + (message.removeprefix(section) if section else message)


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(names)}"


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested plain values, tuples as lists, secrets left out."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.init and "secret" not in field.metadata
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def changed_options(config: Any) -> dict[str, Any]:
    """Returns the options that are not at their defaults, by dotted name (``inner.lr``), as ``--set`` takes them."""
    return dict(_changes(to_mapping(config), to_mapping(type(config)()), ""))


def _changes(values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and value and default:
            yield from _changes(value, default, f"{where}{name}.")
        elif value != default:
            yield f"{where}{name}", value


def to_yaml(config: Any) -> str:
    """Returns text that `read_yaml` and `from_mapping` read back as the same configuration, but for secrets."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, default_flow_style=None, width=100)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a file that holds a mapping; raises `TrainerUsageError` for anything else."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise TrainerUsageError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_yaml(body, str(path))


def parse_yaml(body: bytes, where: str) -> dict[str, Any]:
    """Reads bytes that hold a mapping; raises `TrainerUsageError`, which names ``where`` they are from."""
    try:
        document = yaml.load(body.decode("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise TrainerUsageError(f"{where}: expected UTF-8, found bytes that are none at {error.start}") from error
    except yaml.YAMLError as error:
        raise TrainerUsageError(f"{where}: expected YAML, found {_problem(error)}") from error
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise TrainerUsageError(f"{where}: expected a mapping of options, found {type(document).__name__}")
    return document


def parse_override(text: str) -> dict[str, Any]:
    """Reads ``inner.lr=3e-4`` as a nested mapping; no value, or ``null``, resets the option to its default."""
    path, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in path.split(".")):
        raise TrainerUsageError(f"--set: expected name.name=value, found {text!r}")
    try:
        found = yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise TrainerUsageError(f"--set {path}: expected a YAML value, found {_problem(error)}") from error
    return nested(_ALIASES.get(path, path), _RESET if found is None else found)


def read_run(file: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """Reads a run file's mapping, if there is one, and applies ``name.name=value`` overrides to it, in their order."""
    values = read_yaml(file) if file is not None else {}
    for override in overrides:
        values = merged(values, parse_override(override))
    return values


def _problem(error: yaml.YAMLError) -> str:
    """Returns the error and its place, without the text around it, which may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return "none"


def nested(path: str, value: object) -> dict[str, Any]:
    """Returns a value under a dotted name, as nested mappings."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return cast("dict[str, Any]", value)


def merged(below: Mapping[str, Any], above: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Merges nested mappings; ``above`` wins. Raises TrainerUsageError for a value where ``above`` has options."""
    result = dict(below)
    for name, value in above.items():
        current = result.get(name)
        if not isinstance(value, Mapping) or current is None or current is _RESET:
            result[name] = value
        elif isinstance(current, Mapping):
            result[name] = merged(current, value, f"{where}{name}.")
        else:
            raise TrainerUsageError(f"{where}{name}: expected a mapping of options, found {current!r}"[:_MOST_SAID])
    return result
