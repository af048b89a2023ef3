"""Where weights and engines come from, and where the store is."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from llmgw.config.faults import Refused

SOURCE = (
    "hf://ORG/NAME[@REVISION][/FILE], https://…, s3://BUCKET/KEY, file:///PATH, /PATH or index:PACKAGE==VERSION/FILE"
)
STORE = "sqlite:////PATH (four slashes: the path is whole) or postgresql://USER@HOST/DATABASE"
DOWNLOAD = "a URL of an archive, https://, http:// or file:///PATH"

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_FILE = r"(?:(?!\.{1,2}(?:/|$))[^/\s@]+/)*(?!\.{1,2}$)[^/\s@]+"
_SHAPES = {
    "hf": (re.compile(rf"hf://{_WORD}/{_WORD}(?:@[A-Za-z0-9._-]+)?(?:/{_FILE})?"), "hf://ORG/NAME[@REVISION][/FILE]"),
    "s3": (re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\s]+"), "s3://BUCKET/KEY"),
    "file": (re.compile(r"file:///[^\n]+"), "file:///PATH, with three slashes"),
    "index": (re.compile(rf"index:{_WORD}==[A-Za-z0-9][A-Za-z0-9.!+_-]*/{_FILE}"), "index:PACKAGE==VERSION/FILE"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=.)")


def parse_source(text: str) -> str:
    """A source of weights, as written. Raises Refused."""
    if text.startswith("/") and len(text) > 1 and "\n" not in text:
        return text
    match = _SCHEME.match(text)
    scheme = match[1] if match else ""
    if scheme == "https":
        _web(text, SOURCE)
        return text
    if scheme in _SHAPES:
        shape, words = _SHAPES[scheme]
        if not shape.fullmatch(text):
            raise Refused(SOURCE, f"it should be {words}")
        return text
    raise Refused(SOURCE, _source_hint(text, scheme))


def _source_hint(text: str, scheme: str) -> str:
    if scheme == "http":
        return "weights are fetched over https:// only"
    if scheme:
        return f"there is no scheme `{scheme}:`"
    if re.fullmatch(rf"{_WORD}/{_WORD}", text):
        return f"from the hub: hf://{text}; from this machine: the file's whole path"
    return "a file is named by its whole path: /var/lib/…"


def _web(text: str, expected: str) -> None:
    """Refuses what is no URL of a file. A fragment may state the file's SHA-256, and nothing else."""
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        raise Refused(expected, "host or port can't be read") from None
    if not url.hostname or re.search(r"\s", text):
        raise Refused(expected, "the URL has no host" if not url.hostname else "a URL has no blanks")
    if url.username is not None or url.password is not None:
        raise Refused(expected, "no user or password in it: this file is not the place for secrets")
    if url.path in ("", "/"):
        raise Refused(expected, "the URL names no file")
    if url.fragment and not re.fullmatch(r"sha256=[0-9a-fA-F]{64}", url.fragment):
        raise Refused(expected, "after `#` only sha256=… with 64 hexadecimal digits")


def parse_download(text: str) -> str:
    """A URL of an engine's archive: http is enough, since its SHA-256 is stated. Raises Refused."""
    if text.startswith("file:"):
        shape, words = _SHAPES["file"]
        if not shape.fullmatch(text) or text.endswith("/"):
            raise Refused(DOWNLOAD, f"it should be {words}, on every node")
        return text
    if not re.match(r"https?://", text):
        raise Refused(DOWNLOAD)
    _web(text, DOWNLOAD)
    return text


def parse_store(text: str, base: Path) -> str:
    """The store's URL, SQLite's path made whole from ``base``. Raises Refused."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "sqlite":
        return _sqlite(text, rest, base)
    if separator and scheme == "postgresql":
        return _postgresql(text)
    if separator and scheme == "postgres":
        raise Refused(STORE, "postgresql://, not postgres://")
    raise Refused(STORE, f"for a file: sqlite:///{text}" if text.startswith("/") else "")


def _sqlite(text: str, rest: str, base: Path) -> str:
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path:
        raise Refused(STORE, "a store in memory would forget everything: name a file" if not path else "")
    if re.search(r"[?#\n]", path) or path.startswith("~") or path == ":memory:":
        raise Refused(STORE, "a plain path of a file: no options, no `~`, not in memory")
    return text if path.startswith("/") else f"sqlite:///{base / path}"


def _postgresql(text: str) -> str:
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        # The reason would quote a part of the password where that holds a `/`.
        raise Refused(
            STORE, "host or port can't be read; in a password `/`, `@` and `:` are %2F, %40 and %3A"
        ) from None
    if url.path in ("", "/"):
        raise Refused(STORE, "the database's name is missing")
    return text
