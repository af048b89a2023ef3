"""YAML as plain values that know where they stand in the file.

PyYAML scans and composes; what a scalar means is decided here, by the core schema of YAML 1.2 and nothing more:
``true``, ``false``, ``null`` and decimal numbers. So ``no`` is text, ``8:30`` is not 510, and ``010`` is not 8.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from yaml import MarkedYAMLError, Node
from yaml.composer import Composer, ComposerError
from yaml.nodes import MappingNode, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from llmgw.config.faults import ConfigError, Fault, KeyPath

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000
"""Values of one file, aliases expanded: a few lines of nested aliases can stand for billions."""

_PLAIN, _QUOTED = "plain", "quoted"
_STRING_TAG = "tag:yaml.org,2002:str"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18}|[0-9]{1,18}(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_PASSWORD = re.compile(r"(//[^:@/\s]*):\S*@")
_LONGEST_FOUND = 80

_TOO_DEEP = f"values nested more than {MAX_DEPTH} deep"
_SYNTAX_HINTS = (
    ("\\t", "indent with spaces: YAML takes no tabs there"),
    ("mapping values are not allowed", "check the indentation, and quote a value that has a `: ` in it"),
    ("could not find expected ':'", "each line of a mapping is `key: value`; check the indentation of this one"),
    ("block end", "the indentation of this line fits none of the lines above it"),
    ("block mapping", "the indentation of this line fits none of the lines above it"),
    ("end of stream", "a quote or bracket is opened and never closed"),
    ("stream end", "a quote or bracket is opened and never closed"),
    ("',' or", "a bracket is opened and not closed, or a comma is missing"),
    ("undefined alias", "a value that begins with `*` must be quoted"),
    ("start any token", "quote a value that begins with `@`, `` ` `` or `%`"),
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file, both counted from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Document:
    """A file's values, and where each of them is. ``faults`` are those of the notation, found on the way."""

    name: str
    value: object = None
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    key_marks: dict[KeyPath, Mark] = field(default_factory=dict)
    typed: dict[KeyPath, str] = field(default_factory=dict)
    """Scalars as they stand in the file: 0.10, not 0.1."""
    faults: list[Fault] = field(default_factory=list)
    incomplete: set[KeyPath] = field(default_factory=set)
    """Mappings with a key that could not be read: what seems to be missing there may be what it stood for."""

    def fault(
        self, path: KeyPath, expected: str, *, found: str | None = None, hint: str = "", at_key: bool = False
    ) -> Fault:
        """A fault at ``path``, or at the closest value around it that the file has."""
        mark = self.key_marks.get(path) if at_key else None
        around = path
        while mark is None:
            mark = self.marks.get(around) if around else self.marks.get((), Mark(1, 1))
            around = around[:-1]
        found = self.found(path) if found is None else found
        return Fault(
            file=self.name,
            line=mark.line,
            column=mark.column,
            path=path_text(path),
            expected=expected,
            found=found,
            hint=hint,
        )

    def found(self, path: KeyPath) -> str:
        """The value at ``path`` in words, without the password that it may hold."""
        return in_words(self.at(path), self.typed.get(path))

    def at(self, path: KeyPath) -> object:
        """The value at ``path``, or the closest one around it that there is."""
        value = self.value
        for part in path:
            inside = step(value, part)
            if inside is None:
                break
            value = inside[0]
        return value

    def error(self, faults: list[Fault]) -> ConfigError:
        return ConfigError(self.name, tuple(sorted(faults, key=lambda fault: (fault.line, fault.column))))


def step(value: object, part: str | int) -> tuple[object] | None:
    """What a list or mapping holds under ``part``; None where it holds nothing there."""
    if isinstance(value, dict):
        return (value[part],) if part in value else None
    if isinstance(value, list) and isinstance(part, int):
        return (value[part],) if part < len(value) else None
    return None


def in_words(value: object, typed: str | None = None) -> str:
    """A value as an error shows it: ``"vlm"``, ``the number 0.10``, ``a list``."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {typed if typed is not None else value}"
    text = _PASSWORD.sub(r"\1:…@", str(value))
    return json.dumps(text if len(text) <= _LONGEST_FOUND else text[: _LONGEST_FOUND - 1] + "…", ensure_ascii=False)


def path_text(path: KeyPath) -> str:
    """``models[0].profiles[1].engine``; keys that are no plain words in quotes: ``labels["a b"]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_][\w-]*", part, re.ASCII):
            text += f".{part}" if text else part
        else:
            text += f"[{in_words(part)}]"
    return text


def read(text: str, name: str) -> Document:
    """The one YAML document in ``text``. Raises ConfigError where there is none to go on with."""
    document = Document(name)
    _refuse_junk(document, text)
    root = _compose(document, text)
    _Conversion(document).convert(root)
    return document


def _refuse_junk(document: Document, text: str) -> None:
    if len(text) > MAX_BYTES:
        found = f"{len(text)} characters"
        raise document.error([Fault(file=document.name, expected=f"a file of at most {MAX_BYTES} bytes", found=found)])
    if junk := _UNPRINTABLE.search(text):
        before = text[: junk.start()]
        document.marks[()] = Mark(before.count("\n") + 1, junk.start() - before.rfind("\n"))
        found = f"the control character U+{ord(junk.group()):04X}"
        raise document.error([document.fault((), "a text file (YAML)", found=found, hint="is this the right file?")])


def _compose(document: Document, text: str) -> Node:
    try:
        loader = _Loader(text)
        root = loader.root()
    except MarkedYAMLError as error:
        raise document.error([_syntax_fault(document, error)]) from None
    except (ValueError, OverflowError) as error:
        # PyYAML lets these out for escapes and directives whose numbers are out of range.
        raise document.error([document.fault((), "well-formed YAML", found=str(error))]) from None
    if root is None:
        hint = "see docs/configuration.md for what it has to say"
        raise document.error([Fault(file=document.name, expected="keys and values", found="an empty file", hint=hint)])
    return root


def _syntax_fault(document: Document, error: MarkedYAMLError) -> Fault:
    mark = error.problem_mark or error.context_mark
    if mark is not None:
        document.marks[()] = Mark(mark.line + 1, mark.column + 1)
    found = (error.problem or error.context or "something else").removeprefix("found ")
    hint = error.note or next((hint for words, hint in _SYNTAX_HINTS if words in found), "")
    if error.context and error.context_mark and mark and error.context_mark.line != mark.line:
        found += f" ({error.context} that begins at line {error.context_mark.line + 1})"
    return document.fault((), "well-formed YAML", found=found, hint=hint)


class _Loader(Reader, Scanner, Parser, Composer):
    """Composes nodes, with tags that say how a scalar was written, not what it might mean."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        self._depth = 0

    def root(self) -> Node | None:
        """The only document's root; None in a file that is empty or has comments alone."""
        root = self.get_node() if self.check_node() else None
        if root is not None and self.check_node():
            note = "remove the `---` and what follows it"
            problem = "a second document"
            raise ComposerError("one document", root.start_mark, problem, self.peek_event().start_mark, note)  # type: ignore[no-untyped-call]
        nothing = isinstance(root, ScalarNode) and root.tag == _PLAIN and not root.value
        return None if nothing else root

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, _TOO_DEEP, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[Node], value: str | None, implicit: Any) -> str:
        return _PLAIN if kind is ScalarNode and implicit[0] else _QUOTED

    def descend_resolver(self, parent: Node | None, index: Any) -> None: ...

    def ascend_resolver(self) -> None: ...


class _Conversion:
    """Walks nodes into a document. A value that can't be read is left out, and its fault noted."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.values = 0
        self.open: set[int] = set()

    def convert(self, root: Node) -> None:
        self.document.value = self._value(root, ())

    def _value(self, node: Node, path: KeyPath) -> object:
        self.values += 1
        self.document.marks[path] = _mark(node)
        if self.values > MAX_VALUES:
            hint = "aliases (`*name`) count as what they stand for"
            expected = f"at most {MAX_VALUES} values in a file"
            self._give_up(self.document.fault(path, expected, found="more", hint=hint))
        if id(node) in self.open:
            self._give_up(self.document.fault(path, "a value", found="an alias that contains itself"))
        if node.tag not in (_PLAIN, _QUOTED, _STRING_TAG):
            self._note(
                path,
                "a value without a tag",
                found=f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')}",
                hint="remove the tag",
            )
        self.open.add(id(node))
        try:
            return self._convert(node, path)
        finally:
            self.open.remove(id(node))

    def _convert(self, node: Node, path: KeyPath) -> object:
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        self.document.typed[path] = node.value
        if junk := _UNPRINTABLE.search(node.value):
            self._note(path, "text without control characters", found=f"U+{ord(junk.group()):04X}")
            return _UNPRINTABLE.sub("", node.value)
        return scalar(node.value) if node.tag == _PLAIN else node.value

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                self.document.incomplete.add(path)
                continue
            here = (*path, key)
            if key in values:
                first = self.document.key_marks[here].line
                self._note(
                    here, "each key once", found="the same key again", hint=f"it is first at line {first}", at=key_node
                )
                continue
            self.document.key_marks[here] = _mark(key_node)
            values[key] = self._value(value_node, here)
        return values

    def _key(self, node: Node, path: KeyPath) -> str | None:
        if not isinstance(node, ScalarNode):
            self._note(path, "a key that is text", found="a list or mapping as a key", at=node)
            return None
        text = str(node.value)
        if node.tag == _PLAIN and text == "<<":
            self._note(
                path, "each key written out", found="the merge key `<<`", hint="write out what it merges", at=node
            )
            return None
        plain = scalar(text) if node.tag == _PLAIN else text
        if not isinstance(plain, str):
            self._note(path, "a key that is text", found=in_words(plain, text), hint=f'quote it: "{text}"', at=node)
            return None
        if _UNPRINTABLE.search(text):
            self._note(path, "a key without control characters", found=in_words(text), at=node)
            return None
        return text

    def _give_up(self, fault: Fault) -> NoReturn:
        raise self.document.error([*self.document.faults, fault])

    def _note(self, path: KeyPath, expected: str, *, found: str, hint: str = "", at: Node | None = None) -> None:
        mark = _mark(at) if at is not None else self.document.marks[path]
        fault = Fault(
            file=self.document.name,
            line=mark.line,
            column=mark.column,
            path=path_text(path),
            expected=expected,
            found=found,
            hint=hint,
        )
        self.document.faults.append(fault)


def scalar(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


def _mark(node: Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)
