"""A document against its shape: all faults at once, and an object to try further rules on where there are some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import ValidationError

from llmgw.config.document import Document, in_words, step
from llmgw.config.faults import Fault, KeyPath, Refused
from llmgw.config.hints import close_to, plain_form
from llmgw.config.shape import BROKEN, Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What a rule over several values has to say about one of them."""

    path: KeyPath
    expected: str
    found: str | None = None
    """None: the value itself, in words."""
    hint: str = ""


def check_shape(document: Document, root: type[S], other: type[Section]) -> tuple[S | None, list[Fault]]:
    """The document as ``root``, with BROKEN where a value was refused, and the faults; None where it is no mapping.

    ``other`` is the other file's shape: a key that belongs there is told so.
    """
    base = Path(document.name).absolute().parent
    context = {"base": base}
    reader = _Reader(document, root, other)
    faults: list[Fault] = []
    try:
        file = root.model_validate(document.value, context=context)
        if not document.incomplete:
            return file, []
    except ValidationError as error:
        faults = reader.faults(error)
    if not isinstance(document.value, dict):
        return None, faults
    return root.model_validate(reader.mended(), context=context), faults


class _Reader:
    """Turns pydantic's errors into faults, and keeps a copy of the values in which what was refused is BROKEN."""

    def __init__(self, document: Document, root: type[Section], other: type[Section]) -> None:
        self.document = document
        self.root = root
        self.other = other
        self.refused: list[KeyPath] = []
        self.unknown: list[KeyPath] = []
        self.meant: set[KeyPath] = set()
        """Keys that are missing because they are misspelt: one fault is enough."""

    def faults(self, error: ValidationError) -> list[Fault]:
        errors = error.errors(include_url=False)
        found = [self._unknown_key(_path(line["loc"])) for line in errors if line["type"] == "extra_forbidden"]
        for line in errors:
            if line["type"] != "extra_forbidden":
                found += self._fault(cast("dict[str, Any]", line))
        return found

    def _fault(self, line: dict[str, Any]) -> Iterator[Fault]:
        path = _path(line["loc"])
        if line["loc"] and line["loc"][-1] == "[key]":
            self.unknown.append(path)
            refused: Refused = line["ctx"]["error"]
            found = in_words(path[-1])
            yield self.document.fault(path, refused.expected, found=found, hint=refused.hint, at_key=True)
            return
        self.refused.append(path)
        if line["type"] == "missing":
            if path not in self.meant and path[:-1] not in self.document.incomplete:
                yield self._missing_key(path)
        elif line["type"] == "value_error":
            yield self._refused(path, line["ctx"]["error"])
        else:
            hint = _list_hint(self.document, path) if line["type"] == "list_type" else ""
            yield self.document.fault(path, self._expected_shape(path, line), hint=hint)

    def _refused(self, path: KeyPath, refused: Refused) -> Fault:
        expected, hint = refused.expected, refused.hint
        if refused.quoted is not None:
            hint = _quote_hint(refused.quoted, self.document.typed.get(path, ""))
        elif self.document.at(path) is None:
            section = section_at(self.root, path)
            expected = _keys_of(section) if section is not None else expected
            hint = "leave the key out for its default, or give it a value"
        return self.document.fault(path, expected, hint=hint)

    def _expected_shape(self, path: KeyPath, line: dict[str, Any]) -> str:
        if line["type"] == "list_type":
            return "a list"
        if line["type"] == "too_short":
            return "a list with at least one item"
        section = section_at(self.root, path)
        if section is not None:
            return _keys_of(section)
        return "a mapping" if line["type"] == "dict_type" else str(line["msg"])

    def _missing_key(self, path: KeyPath) -> Fault:
        section, key = section_at(self.root, path[:-1]), path[-1]
        assert section is not None
        assert isinstance(key, str)
        expected = f"`{key}`: {section.model_fields[key].description or 'a value'}"
        return self.document.fault(
            path, expected, found=f"no such key in {section.TITLE}", hint=section.HINTS.get(key, "")
        )

    def _unknown_key(self, path: KeyPath) -> Fault:
        self.unknown.append(path)
        section, key = section_at(self.root, path[:-1]), path[-1]
        assert section is not None
        assert isinstance(key, str)
        meant = self._meant(section, key)
        hint = section.HINTS.get(key, "")
        if meant is not None:
            self.meant.add((*path[:-1], meant))
            hint = hint or f"did you mean `{meant}`?"
        keys = ", ".join(section.model_fields)
        found = f"the unknown key `{key}`" if key.isidentifier() else f"the unknown key {in_words(key)}"
        hint = hint or self._belongs(key)
        return self.document.fault(path, f"a key of {section.TITLE}: {keys}", found=found, hint=hint, at_key=True)

    def _meant(self, section: type[Section], key: str) -> str | None:
        words = {plain_form(word): meant for word, meant in section.WORDS.items()}
        same = {plain_form(field): field for field in section.model_fields}
        form = plain_form(key)
        if form in same or form in words:
            return same.get(form) or words[form]
        if key in dict(keys_of_file(self.root)):
            return None
        return close_to(key, tuple(section.model_fields))

    def _belongs(self, key: str) -> str:
        """Where else a key of this name stands, in this file or in the other one."""
        for root, file in ((self.root, "this file"), (self.other, self.other.TITLE)):
            if places := [place for field, place in keys_of_file(root) if field == key]:
                where = " or ".join(f"in `{place}`" if place else "at the top" for place in places)
                return f"`{key}` belongs {where} of {file}"
        return ""

    def mended(self) -> object:
        """The values, with BROKEN where one was refused or is missing, and without the keys that are not known."""
        values = copy.deepcopy(self.document.value)
        for path in (*self.refused, *self.meant, *self._perhaps_there()):
            _break(values, path)
        for path in self.unknown:
            _remove(values, path)
        return values

    def _perhaps_there(self) -> Iterator[KeyPath]:
        for path in self.document.incomplete:
            section = section_at(self.root, path)
            present = self.document.at(path)
            if section is not None and isinstance(present, dict):
                yield from ((*path, field) for field in section.model_fields if field not in present)


def _keys_of(section: type[Section]) -> str:
    return f"a mapping with the keys of {section.TITLE}: {', '.join(section.model_fields)}"


def _quote_hint(check: Callable[[str], object], typed: str) -> str:
    """Whether quotes are all that is missing."""
    try:
        check(typed)
    except Refused as refused:
        return refused.hint
    return f'quote it: "{typed}"'


def _list_hint(document: Document, path: KeyPath) -> str:
    value = document.at(path)
    if isinstance(value, dict):
        return "each item of a list begins with `- `"
    if value is None:
        return "write [] for an empty list"
    return f"a list of one: [{document.typed.get(path, '')}]" if len(str(value)) < 64 else ""


def _path(loc: tuple[int | str, ...]) -> KeyPath:
    return loc[:-1] if loc and loc[-1] == "[key]" else loc


def _break(values: Any, path: KeyPath) -> None:
    """Puts BROKEN at ``path``, or at the closest thing around it that can hold it."""
    holder, last = values, path[0]
    for part in path[1:]:
        inside = step(holder, last)
        if inside is None or not isinstance(inside[0], dict | list):
            break
        holder, last = inside[0], part
    holder[last] = BROKEN


def _remove(values: Any, path: KeyPath) -> None:
    """Takes the key at ``path`` out, where what is around it still stands."""
    for part in path[:-1]:
        values = (step(values, part) or (None,))[0]
    if isinstance(values, dict):
        values.pop(path[-1], None)


def inner_section(annotation: object) -> type[Section] | None:
    """The section in an annotation such as ``list[Item[ModelFile]]`` or ``Tls | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := inner_section(part)) is not None), None)


@cache
def _section_in(section: type[Section], key: str) -> type[Section] | None:
    field = section.model_fields.get(key)
    return inner_section(field.annotation) if field is not None else None


def section_at(root: type[Section], path: KeyPath) -> type[Section] | None:
    """The section that describes the mapping at ``path``; None where none does."""
    section: type[Section] | None = root
    for part in path:
        if isinstance(part, str):
            section = _section_in(section, part) if section is not None else None
    return section


@cache
def keys_of_file(root: type[Section]) -> tuple[tuple[str, str], ...]:
    """All keys of a file with the place of each: ``("replicas", "models[]")``."""
    return tuple(_keys_below(root, ""))


def _keys_below(section: type[Section], place: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        yield name, place
        inner = inner_section(field.annotation)
        if inner is not None:
            many = "[]" if str(field.annotation).startswith("list[") else ""
            yield from _keys_below(inner, f"{place}.{name}{many}" if place else f"{name}{many}")
