"""From plain values (YAML, command line) to configuration dataclasses, and back.

Strict where it helps: an unknown name is an error that suggests the nearest known one, a value of the wrong type says
which field, what was expected and what was found. Missing names take the dataclass's defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from trainer.errors import TrainerUsageError

__all__ = ["from_mapping", "merged", "parse_override", "read_yaml", "to_mapping", "to_yaml"]

ConfigT = TypeVar("ConfigT")


def from_mapping(kind: type[ConfigT], values: Mapping[str, Any], where: str = "") -> ConfigT:
    """Builds a dataclass, and the dataclasses in it, from nested mappings.

    Args:
        kind: a dataclass.
        values: by field name.
        where: prefix for messages, such as ``inner.``.

    Raises:
        TrainerUsageError: a name is unknown, or a value is not of its field's type or range.
    """
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"expected a dataclass, found {kind!r}")
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    for name in values:
        if name not in names:
            raise TrainerUsageError(
                f"{where}{name}: expected one of {', '.join(names)}, found this{_nearest(name, names)}"
            )
    arguments = {name: _value(hints[name], value, f"{where}{name}") for name, value in values.items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise TrainerUsageError(f"{where or 'configuration'}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise TrainerUsageError(f"{where}: expected a mapping of options, found {value!r}")
        return from_mapping(hint, value, f"{where}.")
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise TrainerUsageError(f"{where}: {first['msg'].lower()}, found {str(value)[:80]!r}") from error


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def to_mapping(config: Any) -> dict[str, Any]:
    """The other way: nested plain values, tuples as lists."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def to_yaml(config: Any) -> str:
    """What `read_yaml` and `from_mapping` read back as the same configuration."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, default_flow_style=None, width=100)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's mapping.

    Raises:
        TrainerUsageError: it cannot be read, or is no mapping.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainerUsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainerUsageError(f"{path}: expected YAML, found {' '.join(str(error).split())[:200]}") from error
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise TrainerUsageError(f"{path}: expected a mapping of options, found {type(document).__name__}")
    return document


def parse_override(text: str) -> dict[str, Any]:
    """``inner.lr=3e-4`` as a nested mapping.

    Raises:
        TrainerUsageError: it is not of that form.
    """
    path, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in path.split(".")):
        raise TrainerUsageError(f"--set: expected name.name=value, found {text!r}")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise TrainerUsageError(f"--set {path}: expected a YAML value, found {value!r}") from error
    for name in reversed(path.split(".")):
        nested = {name: nested}
    return dict(nested)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, one over the other."""
    result = dict(below)
    for name, value in above.items():
        current = result.get(name)
        result[name] = merged(current, value) if isinstance(current, Mapping) and isinstance(value, Mapping) else value
    return result
