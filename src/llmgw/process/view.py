"""What an unprivileged program sees of the file system.

Programs and weights often lie below a directory that is closed to other users (``/root``, a home). Rather than opening
that directory for everybody, the program gets a mount table of its own in which the topmost closed directory is an
empty one that holds the needed paths and nothing else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

from llmgw.process import linux
from llmgw.process.account import Account
from llmgw.process.errors import StartError

_LINKS_FOLLOWED = 40
"""As many as the kernel follows (path_resolution(7))."""


@dataclass(frozen=True, slots=True)
class Route:
    """What is passed on the way to a path: the links, and the real place at its end."""

    place: str
    links: dict[str, str] = field(default_factory=dict)


def route(path: str) -> Route:
    """Follow an absolute path link by link. Raises StartError where it leads nowhere."""
    links: dict[str, str] = {}
    todo = [part for part in reversed(path.split("/")) if part]
    here, followed = "/", 0
    while todo:
        part = todo.pop()
        if part in (".", ".."):
            here = os.path.dirname(here) if part == ".." else here
            continue
        step = os.path.join(here, part)
        try:
            mode = os.lstat(step).st_mode
        except OSError as error:
            raise StartError(f"{path} is needed but can't be reached: {step}: {error.strerror}") from None
        if not stat.S_ISLNK(mode):
            here = step
            continue
        followed += 1
        if followed > _LINKS_FOLLOWED:
            raise StartError(f"{path} is needed but can't be reached: too many links, the last one is {step}")
        links[step] = target = os.readlink(step)
        here = "/" if target.startswith("/") else here
        todo.extend(part for part in reversed(target.split("/")) if part)
    return Route(here, links)


@dataclass(slots=True)
class View:
    """Which directories have to be covered, and what has to be put into each."""

    covers: dict[str, set[str]] = field(default_factory=dict)
    """Topmost closed directory -> the real places below it that are needed."""
    links: dict[str, str] = field(default_factory=dict)
    """Links below covered directories."""
    writable: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.covers)


def plan(reads: Iterable[str], writes: Iterable[str], enters: Callable[[str], bool]) -> View:
    """Work out the view. ``enters`` says whether the program's user may pass through a directory."""
    view = View()
    wanted = [(path, False) for path in reads] + [(path, True) for path in writes]
    for path, writable in wanted:
        way = route(path)
        for passed in (*way.links, way.place):
            cover = _topmost_closed(passed, enters)
            if cover is None:
                continue
            if cover == "/":
                raise StartError(f"the root directory is closed to the program's user (needed for {path})")
            places = view.covers.setdefault(cover, set())
            if passed == way.place:
                places.add(passed)
            else:
                view.links[passed] = way.links[passed]
        if writable:
            view.writable.add(way.place)
    return view


def _topmost_closed(place: str, enters: Callable[[str], bool]) -> str | None:
    parts = place.split("/")[1:-1]
    ancestors = ["/"] + ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]
    return next((ancestor for ancestor in ancestors if not enters(ancestor)), None)


@contextmanager
def acting_as(who: Account) -> Iterator[None]:
    """See the file system with another user's rights for a moment. Needs root, and a process with one thread."""
    groups, gid, uid = os.getgroups(), os.getegid(), os.geteuid()
    os.setgroups(who.groups)
    os.setegid(who.gid)
    os.seteuid(who.uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(groups)


def enter(reads: Iterable[str], writes: Iterable[str], who: Account) -> None:
    """Make every path reachable for ``who`` in this process and its children. Raises StartError in words."""
    view = plan(reads, writes, cache(partial(_enters, who)))
    if not view:
        return
    try:
        linux.unshare_mounts()
        for cover in sorted(view.covers):
            _cover(cover, view)
    except OSError as error:
        raise StartError(f"the paths that {who.name} needs could not be mounted for it: {error}") from None


def _enters(who: Account, directory: str) -> bool:
    with acting_as(who):
        return os.access(directory, os.X_OK, effective_ids=True)


def _cover(cover: str, view: View) -> None:
    """Put an empty directory over ``cover`` and bind into it what is needed, each from before it was covered."""
    sources = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in _outermost(view, cover)}
    linux.mount("tmpfs", cover, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=1m")
    for link, target in view.links.items():
        if link.startswith(cover + "/") and not os.path.lexists(link):
            os.makedirs(os.path.dirname(link), mode=0o755, exist_ok=True)
            os.symlink(target, link)
    for place, source in sources.items():
        _bind(source, place, writable=place in view.writable)
        os.close(source)
    linux.mount(
        None, cover, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    )


def _outermost(view: View, cover: str) -> list[str]:
    """The places to bind, parents first, without those that come with a place above them."""
    chosen: list[str] = []
    for place in sorted(view.covers[cover], key=lambda place: place.split("/")):
        covered = any(place.startswith(above + "/") for above in chosen)
        if not covered or place in view.writable:
            chosen.append(place)
    return chosen


def _bind(source: int, place: str, *, writable: bool) -> None:
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(place, mode=0o755, exist_ok=True)
    elif not os.path.lexists(place):
        os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    linux.mount(f"/proc/self/fd/{source}", place, None, linux.MS_BIND | linux.MS_REC)
    if not writable:
        flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | _mount_flags(place)
        linux.mount(None, place, None, flags)


def _mount_flags(place: str) -> int:
    """The flags of the mount at ``place``, which a remount has to repeat to keep. statvfs(3) uses the same values."""
    return os.statvfs(place).f_flag & (
        linux.MS_NOSUID | linux.MS_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
    )


def unreadable(paths: Iterable[str]) -> str | None:
    """Why this process can't read one of the paths, in words; None where it can read them all."""
    for path in paths:
        need = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
        if not os.access(path, need):
            return f"{path} ({_rights(path)})"
    return None


def _rights(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError as error:
        return error.strerror or str(error)
    return f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}:{status.st_gid}"
