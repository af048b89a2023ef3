"""Downloads from the Python package index, by pip.

pip rather than an HTTP client: it goes by the machine's own configuration, so mirrors, proxies, certificates and
find-links directories that work for its operator work here too.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch import complaints
from llmgw.agent.fetch.child import ending, started
from llmgw.agent.fetch.disk import NoRoom, megabytes, require_room, sha256_of
from llmgw.agent.fetch.threads import Pace, in_thread

STALL_S = 60.0
"""Without a byte or a step for this long, a download is given up."""

LIMIT_S = 4 * 3600.0

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_DOWNLOADING = re.compile(r"\s*Downloading \S*?([^/\s]+\.whl)")
_OUTPUT_LINES = 200


class FetchFailed(Exception):
    """The file could not be had; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One wheel of the index."""

    package: str
    version: str
    sha256: str | None = None
    """Of the wheel. None: the index's own hash is what it is checked against."""
    platform: str | None = None
    """Platform tag, where the wheel is to be had whatever pip thinks of this machine."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    wheel: Path
    sha256: str


Progress = Callable[[str], None]
"""Takes what to show people: "downloading x.whl (65 MB, 42 %)"."""


async def fetch(
    wanted: Wanted,
    folder: Path,
    progress: Progress,
    *,
    verifying: Callable[[], None] = lambda: None,
    extra_bytes: int = 0,
    stall_s: float = STALL_S,
    limit_s: float = LIMIT_S,
) -> Fetched:
    """Downloads one wheel into ``folder``, which is emptied first and must be nobody else's.

    ``extra_bytes`` is what the caller needs on the same file system besides; ``verifying`` is called once the
    wheel is here. Raises FetchFailed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        await _Download(wanted, folder, progress, extra_bytes, stall_s).run(limit_s)
        wheels = list((folder / "wheels").glob("*.whl"))
        if len(wheels) != 1:
            raise FetchFailed(f"pip left {len(wheels)} wheels of {wanted} instead of one: run it by hand to see why")
        verifying()
        digest = await in_thread(lambda stop: sha256_of(wheels[0], stop))
    except NoRoom as error:
        raise FetchFailed(str(error)) from None
    except OSError as error:
        raise FetchFailed(f"{error.filename or folder}: {error.strerror or error}") from error
    if wanted.sha256 is not None and digest != wanted.sha256:
        raise FetchFailed(complaints.wrong_hash(str(wanted), wanted.sha256, digest))
    return Fetched(wheel=wheels[0], sha256=digest)


class _Download:
    def __init__(self, wanted: Wanted, folder: Path, progress: Progress, extra_bytes: int, stall_s: float) -> None:
        self._wanted = wanted
        self._folder = folder
        self._progress = progress
        self._extra_bytes = extra_bytes
        self._stall_s = stall_s
        self._lines: list[str] = []
        self._wheel = str(wanted)
        self._received = -1
        self._stall = asyncio.timeout(None)
        self._pace = Pace()

    async def run(self, limit_s: float) -> None:
        (self._folder / "tmp").mkdir()
        argv = self._argv()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit, self._stall, started(argv, env=self._environment(), cwd=str(self._folder)) as pip:
                self._alive()
                assert pip.stdout is not None
                assert pip.stderr is not None
                await self._read(pip.stdout, pip.stderr)
                status = await pip.wait()
        except TimeoutError:
            raise FetchFailed(self._too_slow(limit.expired(), limit_s)) from None
        if status != 0:
            lines = [*self._lines, *self._skipped()]
            raise FetchFailed(complaints.explain(str(self._wanted), self._wanted.sha256, lines, ending(status)))

    def _argv(self) -> list[str]:
        requirement = f"{self._wanted.package}=={self._wanted.version}"
        flags = ["--no-input", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar", "raw"]
        if self._wanted.platform is not None:
            flags += ["--platform", self._wanted.platform]
        if self._wanted.sha256 is not None:
            flags += ["--require-hashes"]
            requirement += f" --hash=sha256:{self._wanted.sha256}"
        asked = self._folder / "requirements.txt"
        asked.write_text(f"{requirement}\n")
        flags += ["--dest", "wheels", "--log", "pip.log", "--requirement", str(asked)]
        return [sys.executable, "-m", "pip", "download", *flags]

    def _skipped(self) -> list[str]:
        """Index pages that pip could not read: it says so in its log alone, and then that there is no such package."""
        try:
            log = (self._folder / "pip.log").read_text(errors="replace")
        except OSError:
            return []
        return [line for line in log.splitlines() if "Could not fetch URL" in line and " 404 " not in line]

    def _environment(self) -> Mapping[str, str]:
        """The machine's own, but for what would make pip do something else than download."""
        spoil = {"PIP_TARGET", "PIP_REQUIRE_VIRTUALENV", "PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_LOG", "PYTHONPATH"}
        kept = {name: value for name, value in os.environ.items() if name not in spoil}
        return {
            **kept,
            # On the same file system, and removed with the folder.
            "TMPDIR": str(self._folder / "tmp"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_RESUME_RETRIES": "5",
            "PYTHONUNBUFFERED": "1",
            "LC_ALL": "C.UTF-8",
        }

    async def _read(self, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        try:
            async with asyncio.TaskGroup() as readers:
                readers.create_task(self._read_stdout(stdout))
                readers.create_task(self._read_stderr(stderr))
        except* NoRoom as group:
            words = str(group.exceptions[0])
        else:
            return
        raise NoRoom(words)

    async def _read_stdout(self, lines: asyncio.StreamReader) -> None:
        async for line in _lines_of(lines):
            if found := _PROGRESS.fullmatch(line):
                self._count(int(found[1]), int(found[2]))
                continue
            self._alive()
            if found := _DOWNLOADING.match(line):
                self._wheel = found[1]
                self._received = -1

    async def _read_stderr(self, lines: asyncio.StreamReader) -> None:
        # Complaints are no sign of life: pip may go on retrying for long.
        async for line in _lines_of(lines):
            self._lines.append(line)
            del self._lines[:-_OUTPUT_LINES]

    def _count(self, received: int, total: int) -> None:
        if self._received < 0:
            # pip copies from its temporary folder into the one asked for: the wheel is there twice for a moment.
            require_room(self._folder, 2 * total + self._extra_bytes)
        if received > self._received:
            self._received = received
            self._alive()
        percent = 100 * received // total if total else 100
        if self._pace.due(percent):
            self._progress(f"downloading {self._wheel} ({megabytes(total)}, {percent} %)")

    def _alive(self) -> None:
        self._stall.reschedule(asyncio.get_running_loop().time() + self._stall_s)

    def _too_slow(self, limit_reached: bool, limit_s: float) -> str:
        if limit_reached:
            return f"downloading {self._wheel} took longer than {limit_s:g} s"
        if self._received < 0:
            reason = complaints.network(self._lines) or "nothing came back"
            return f"the package index did not answer for {self._stall_s:g} s when asked for {self._wanted}: {reason}"
        return f"downloading {self._wheel} stopped after {megabytes(self._received)}: no byte for {self._stall_s:g} s"


async def _lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the reader's limit: not one of those that matter
            continue
        if not line:
            return
        yield line.decode("utf-8", "replace").rstrip()
