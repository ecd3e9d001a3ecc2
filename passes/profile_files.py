"""Nested frozen dataclasses as TOML or JSON text and back, with errors that name the entry.

A tuple of pairs stands for a table whose keys are data: it can be hashed, and a dict cannot.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

Entries = Mapping[str, Any]


def read(path: Path) -> dict[str, Any]:
    """What a ``.toml`` or ``.json`` file holds.

    Raises:
        ValueError: it has another suffix, or is not of that form.
        OSError: it cannot be read.
    """
    parse, _ = _form(path)
    return table("the file", parse(path.read_text()))


def write(path: Path, entries: Entries) -> None:
    """Write a file that ``read`` reads.

    Raises:
        ValueError: it has another suffix.
    """
    _, render = _form(path)
    path.write_text(render(entries))


def plain(value: Any) -> Any:
    """A dataclass as nested dicts of what it holds."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return {key: plain(part) for key, part in value}
    return value


def pairs(where: str, entries: Any) -> tuple[tuple[str, Any], ...]:
    """A table as pairs, in order of its keys."""
    return tuple(sorted(table(where, entries).items()))


def table(where: str, entries: Any) -> dict[str, Any]:
    """``entries``, if they are a table.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(entries, Mapping):
        raise ValueError(f"{where} must be a table, not {entries!r}")
    return dict(entries)


def build(kind: type, where: str, entries: Entries) -> Any:
    """Call a dataclass with exactly its fields.

    Raises:
        ValueError: there are others, or some are missing.
    """
    inside = f" in {where}" if where else ""
    known = {each.name: each for each in fields(kind)}
    for name in entries:
        if name not in known:
            raise ValueError(f"unknown entry {name!r}{inside}; known are {', '.join(known)}")
    for name, each in known.items():
        if name not in entries and each.default is MISSING:
            raise ValueError(f"missing entry {name!r}{inside}")
    return kind(**entries)


def is_file_name(name: str) -> bool:
    """Whether ``name`` is that of a file which ``read`` might read."""
    return Path(name).suffix in _FORMS


def _form(path: Path) -> tuple[Callable[[str], Any], Callable[[Entries], str]]:
    if path.suffix not in _FORMS:
        raise ValueError(f"{path.name!r} is neither a .toml nor a .json file")
    return _FORMS[path.suffix]


def _as_json(entries: Entries) -> str:
    return json.dumps(entries, indent=2) + "\n"


def _as_toml(entries: Entries) -> str:
    return "\n".join(_toml_lines(entries, "")) + "\n"


def _toml_lines(entries: Entries, section: str) -> Iterator[str]:
    """First the values of a table, then the tables in it: what follows a table's header belongs to it."""
    tables = {key: value for key, value in entries.items() if isinstance(value, Mapping)}
    if section and len(tables) < len(entries):
        yield f"\n[{section}]"
    for key, value in entries.items():
        if key not in tables:
            yield f"{key} = {json.dumps(value)}"  # strings and finite numbers are written alike in TOML
    for key, inner in tables.items():
        yield from _toml_lines(inner, f"{section}.{key}" if section else key)


_FORMS = {".toml": (tomllib.loads, _as_toml), ".json": (json.loads, _as_json)}
