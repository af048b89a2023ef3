"""Builds in a publisher's GitHub releases: one request says what there is, and each archive's SHA-256."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from llmgw.agent.fetch.artifact import Access, Artifact, FetchFailed
from llmgw.agent.fetch.complaints import Broken, host_of, refusal, shown
from llmgw.agent.fetch.found import Found
from llmgw.agent.fetch.transport import Transport, read
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines.releases import REPOSITORIES, NoBuild, choose

API = "https://api.github.com"
API_VARIABLE = "LLMGW_GITHUB_API"
"""Names another place that answers like GitHub's REST API: a mirror, GitHub Enterprise."""

TOKEN_VARIABLE = "GITHUB_TOKEN"
LISTING_BYTES = 16 << 20
PATIENCE_S = 30.0

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OTHER_WAYS = "or use `source: index`, or a mirror's {url, sha256}"


async def resolve(spec: EngineSpec, inventory: Inventory, *, build: BuildKind | None = None) -> Found:
    """The archives of release ``spec.version`` that this machine runs. Raises FetchFailed, in words."""
    repository = REPOSITORIES.get(spec.name)
    if repository is None:
        raise FetchFailed(
            f"{spec.name} is not installed from GitHub: say `source: index`, or name its program in the agent's file"
        )
    assets = await _assets(repository, spec.version)
    archives = {name: asset for name, asset in assets.items() if name.endswith((".zip", ".gz", ".xz", ".zst"))}
    try:
        choice = choose(spec.name, spec.version, tuple(archives), inventory, build=build)
    except NoBuild as error:
        raise FetchFailed(str(error)) from None
    artifacts = tuple(_artifact(archives[name], spec, main=name == choice.names[0]) for name in choice.names)
    numbered = re.fullmatch(r"b[0-9]+", spec.version)
    return Found(artifacts=artifacts, variant=choice.variant, reads_as=spec.version if numbered else None)


async def _assets(repository: str, tag: str) -> Mapping[str, Mapping[str, Any]]:
    """A release's files by name. Raises FetchFailed."""
    api = (os.environ.get(API_VARIABLE) or API).rstrip("/")
    url = f"{api}/repos/{repository}/releases/tags/{quote(tag, safe='')}"
    headers = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
    if token := os.environ.get(TOKEN_VARIABLE):
        headers["Authorization"] = f"Bearer {token}"
    what = f"the release {tag} of {repository}"
    try:
        async with Transport(Access(), patience_s=PATIENCE_S, decompress=True) as transport:
            status, said, body, _ = await read(transport, url, headers, most_bytes=LISTING_BYTES)
        if status != 200:
            raise _refused(status, said, what, url, token is not None)
    except Broken as error:
        raise FetchFailed(f"{what} can't be asked for: {error}; {_OTHER_WAYS}") from None
    return _read_listing(body, what, url)


def _read_listing(body: bytes, what: str, url: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        assets = json.loads(body)["assets"]
        return {str(asset["name"]): asset for asset in assets}
    except (ValueError, KeyError, TypeError):
        raise FetchFailed(
            f"{shown(url)} answers for {what} with what is no release of GitHub's API: look at {API_VARIABLE}"
        ) from None


def _artifact(asset: Mapping[str, Any], spec: EngineSpec, *, main: bool) -> Artifact:
    name, url, size = asset["name"], asset.get("browser_download_url"), asset.get("size")
    if asset.get("state") != "uploaded":
        raise FetchFailed(f"{name} of {spec.name} {spec.version} is still being uploaded there; it is asked for again")
    if not isinstance(url, str):
        raise FetchFailed(f"the listing of {spec.name} {spec.version} has no address for {name}")
    stated = _DIGEST.fullmatch(asset.get("digest") or "")
    sha256 = stated[1] if stated else None
    if main and spec.sha256 is not None:
        if sha256 not in (None, spec.sha256):
            raise FetchFailed(f"GitHub states sha256 {sha256} for {name}, and the cluster's file {spec.sha256}")
        sha256 = spec.sha256
    if sha256 is None:
        raise FetchFailed(
            f"GitHub states no sha256 for {name} (it is older than they are there): nothing is fetched unchecked. "
            f"Take a later build, or state it: source: {{url: {url}, sha256: …}}"
        )
    return Artifact(name=name, url=url, sha256=sha256, size_bytes=size if isinstance(size, int) else None)


def _refused(status: int, said: Mapping[str, str], what: str, url: str, with_token: bool) -> FetchFailed | Broken:
    limited = said.get("x-ratelimit-remaining") == "0" or "retry-after" in said
    if status in (403, 429) and limited:
        way = f"another {TOKEN_VARIABLE}" if with_token else f"{TOKEN_VARIABLE} in the agent's environment raises it"
        return FetchFailed(
            f"{host_of(url)} takes no more requests from here{_until(said)}: {what} is asked for again then; "
            f"{way}, {_OTHER_WAYS}"
        )
    if status == 404:
        place, _, tag = url.partition("/releases/tags/")
        return FetchFailed(
            f"there is no release {tag} at {host_of(url)}{place.rpartition('/repos')[2]}: numbers are skipped there; "
            f"the tags that exist are listed by curl {shown(place)}/releases"
        )
    if status == 401 and with_token:
        return FetchFailed(f"{host_of(url)} does not take the {TOKEN_VARIABLE} of the agent's environment (401)")
    return refusal(status, "", what, url)


def _until(said: Mapping[str, str]) -> str:
    """When requests are taken again, from either header that may say so."""
    try:
        wait = said.get("retry-after")
        at = time.time() + float(wait) if wait is not None else float(said["x-ratelimit-reset"])
        ends = datetime.fromtimestamp(at, UTC)
    except (KeyError, ValueError, OverflowError, OSError):
        return ""
    minutes = max(1, round((at - time.time()) / 60))
    return f" until {ends:%H:%M} UTC (in {minutes} minute{'s' if minutes != 1 else ''})"
