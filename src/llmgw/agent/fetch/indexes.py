"""Which Python package indexes this machine uses, by its own configuration of pip and uv: mirrors and all."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmgw.agent.fetch.artifact import Access, FetchFailed
from llmgw.agent.fetch.pip_settings import default_index, pip_settings

_UV_FILES = ("/etc/uv/uv.toml", "~/.config/uv/uv.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexes:
    """Where packages are looked for, in this order."""

    find_links: tuple[str, ...] = ()
    """Folders, files and pages with links to wheels."""
    urls: tuple[str, ...] = ()
    """Of indexes; credentials may stand in them."""
    access: Access = field(default_factory=Access)


async def configured() -> Indexes:
    """What pip and uv would use here. Raises FetchFailed where the configuration can't be read."""
    pip = await pip_settings("download")
    uv = _uv()
    closed = pip.get("no-index", "").lower() in ("1", "true", "yes", "on")
    main = pip.get("index-url") or next(iter(uv["index-url"]), "")
    if not main and not closed:
        main = await default_index()
    more = (*_listed(pip.get("extra-index-url")), *uv["extra-index-url"])
    links = (*_listed(pip.get("find-links")), *uv["find-links"])
    return Indexes(
        find_links=tuple(dict.fromkeys(links)),
        urls=() if closed else tuple(dict.fromkeys((main, *more))),
        access=Access(
            ca=_path(pip.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")),
            client_cert=_path(pip.get("client-cert")),
            proxy=pip.get("proxy") or None,
            trusted_hosts=tuple(_listed(pip.get("trusted-host"))),
        ),
    )


def _uv() -> Mapping[str, tuple[str, ...]]:
    """uv's indexes and links: what the environment says, else its files for the user and the machine."""
    tables = [_uv_environment(), *(_uv_table(Path(name).expanduser()) for name in reversed(_UV_FILES))]
    keys = ("index-url", "extra-index-url", "find-links")
    return {key: next((found[key] for found in tables if found[key]), ()) for key in keys}


def _uv_environment() -> dict[str, tuple[str, ...]]:
    def named(*variables: str) -> tuple[str, ...]:
        values = (os.environ.get(name, "") for name in variables)
        # UV_INDEX may give an index a name: NAME=URL.
        return tuple(each.partition("=")[2] if _has_name(each) else each for value in values for each in _listed(value))

    return {
        "index-url": named("UV_DEFAULT_INDEX") or named("UV_INDEX_URL"),
        "extra-index-url": named("UV_INDEX", "UV_EXTRA_INDEX_URL"),
        "find-links": tuple(os.environ.get("UV_FIND_LINKS", "").replace(",", " ").split()),
    }


def _has_name(index: str) -> bool:
    name, equals, _ = index.partition("=")
    return bool(equals) and "/" not in name


def _uv_table(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError:
        table = {}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FetchFailed(f"{path} can't be read: {error}") from None
    indexes = [each for each in table.get("index", []) if isinstance(each, dict) and isinstance(each.get("url"), str)]
    main = tuple(each["url"] for each in indexes if each.get("default"))
    others = tuple(each["url"] for each in indexes if not each.get("default") and not each.get("explicit"))
    return {
        "index-url": main or tuple(_strings(table.get("index-url"))),
        "extra-index-url": (*others, *_strings(table.get("extra-index-url"))),
        "find-links": tuple(_strings(table.get("find-links"))),
    }


def _strings(value: Any) -> Iterator[str]:
    values = value if isinstance(value, list) else [value]
    yield from (each for each in values if isinstance(each, str))


def _listed(value: str | None) -> tuple[str, ...]:
    return tuple((value or "").split())


def _path(value: str | None) -> Path | None:
    return Path(value).expanduser() if value else None
