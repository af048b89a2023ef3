"""What a package index, or a place with links to wheels, lists: JSON (PEP 691), HTML (PEP 503), folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.complaints import host_of, refusal, shown
from llmgw.agent.fetch.transport import Transport, basic, read

PAGE_BYTES = 64 << 20
ACCEPT = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1, "
    "application/json;q=0.1"
)

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One file that a page lists."""

    name: str
    url: str
    page: str
    """Where it was listed."""
    sha256: str | None = None
    size_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The page's credentials, for files of the same host."""
    path: Path | None = None
    """For a file of this machine."""


async def links_of_index(transport: Transport, index: str, package: str) -> Sequence[Link]:
    """The files of a package; none where the index has no such package. Raises Broken, FetchFailed."""
    page = f"{index.rstrip('/')}/{package}/"
    if urlsplit(index).scheme == "file":
        return _local(Path(unquote(urlsplit(page).path)), page)
    if urlsplit(index).scheme not in ("http", "https"):
        raise FetchFailed(f"{shown(index)} is no URL of a package index: look at pip's configuration (index-url)")
    return await _fetched(transport, page, f"the package {package}", absent=(404,))


async def links_of_place(transport: Transport, place: str) -> Sequence[Link]:
    """The files that a find-links entry names: a folder, a file of links, or a page. Raises Broken, FetchFailed."""
    scheme = urlsplit(place).scheme
    if scheme in ("http", "https"):
        return await _fetched(transport, place, "its links", absent=())
    path = Path(unquote(urlsplit(place).path)) if scheme == "file" else Path(place).expanduser()
    return _local(path, path.resolve().as_uri())


def read_html(text: str, page: str) -> list[Link]:
    parser = _Anchors()
    parser.feed(text)
    parser.close()
    base = urljoin(page, parser.base) if parser.base else page
    return [link for href in parser.hrefs if (link := _anchor(href, base, page)) is not None]


def read_json(body: bytes, page: str) -> list[Link]:
    """Raises FetchFailed where it is no listing."""
    try:
        return [_file(entry, page) for entry in json.loads(body)["files"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FetchFailed(f"{shown(page)} answers with JSON that is no list of files of a package") from None


async def _fetched(transport: Transport, page: str, what: str, absent: Iterable[int]) -> Sequence[Link]:
    status, headers, body, url = await read(transport, page, {"Accept": ACCEPT}, most_bytes=PAGE_BYTES)
    if status in absent:
        return ()
    if status in (401, 403):
        raise FetchFailed(
            f"{host_of(page)} answered {status} when asked for {what}: look at the credentials in pip's configuration"
        )
    if status != 200:
        raise refusal(status, "", what, page)
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    links = read_json(body, url) if kind.endswith("json") else read_html(body.decode("utf-8", "replace"), url)
    return [_with_credentials(link, page) for link in links]


def _with_credentials(link: Link, page: str) -> Link:
    """As pip does: what opened the page opens the files beside it, on the same host."""
    parts = urlsplit(page)
    same = (urlsplit(link.url).scheme, urlsplit(link.url).netloc) == (parts.scheme, parts.netloc.rpartition("@")[2])
    if parts.username is None or not same:
        return link
    header = basic(unquote(parts.username), unquote(parts.password or ""))
    return Link(
        name=link.name,
        url=link.url,
        page=link.page,
        sha256=link.sha256,
        size_bytes=link.size_bytes,
        headers={"Authorization": header},
    )


def _file(entry: Mapping[str, Any], page: str) -> Link:
    sha256 = str((entry.get("hashes") or {}).get("sha256", "")).lower()
    size = entry.get("size")
    return Link(
        name=str(entry["filename"]),
        url=urljoin(page, str(entry["url"])),
        page=page,
        sha256=sha256 if _SHA256.fullmatch(sha256) else None,
        size_bytes=size if isinstance(size, int) else None,
    )


def _anchor(href: str, base: str, page: str) -> Link | None:
    try:
        url, fragment = urldefrag(urljoin(base, href))
        name = unquote(urlsplit(url).path).rpartition("/")[2]
    except ValueError:
        return None
    kind, _, value = fragment.partition("=")
    stated = value.lower() if kind == "sha256" and _SHA256.fullmatch(value.lower()) else None
    local = Path(unquote(urlsplit(url).path)) if urlsplit(url).scheme == "file" else None
    return Link(name=name, url=url, page=page, sha256=stated, path=local) if name else None


def _local(path: Path, page: str) -> Sequence[Link]:
    """Of this machine: a folder's page if it has one, else its files; or a page itself."""
    try:
        if path.is_dir():
            index = path / "index.html"
            if not index.is_file():
                return [
                    Link(name=each.name, url=each.resolve().as_uri(), page=page, path=each)
                    for each in sorted(path.glob("*.whl"))
                ]
            path = index
        elif not path.exists():
            return ()
        elif path.suffix == ".whl":
            return [Link(name=path.name, url=path.resolve().as_uri(), page=page, path=path)]
        return read_html(path.read_text(errors="replace"), path.resolve().as_uri())
    except OSError as error:
        raise FetchFailed(f"{path} can't be read: {error.strerror}") from None


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.hrefs.append(href.strip())
        elif tag == "base" and href and not self.base:
            self.base = href.strip()
