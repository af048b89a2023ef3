"""uv as a child of the agent: its progress in words, given up where it stands still, its complaints explained."""

from __future__ import annotations

import asyncio
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmgw.agent.fetch.child import ending, started
from llmgw.agent.fetch.disk import megabytes

STALL_S = 90.0
"""Nothing read, written, said or computed for this long: it hangs. Its own limit for a silent connection is 30 s."""
LIMIT_S = 4 * 3600.0
LOOK_S = 1.0

_OUTPUT_LINES = 200
_BUSY_TICKS = 5
_COUNT = re.compile(r"(Resolved|Prepared|Installed) (\d+) packages?\b")

Progress = Callable[[str, int], None]
"""Takes how far it is (``resolved``, ``prepared`` or ``installed``; empty before) and the bytes written so far."""


class UvFailed(Exception):
    """It ended badly or hung; the message says why, in words that say what to do."""


def program() -> Path:
    """uv belongs to what llmgw is installed with. Raises UvFailed."""
    places = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    found = next((place / "uv" for place in places if (place / "uv").is_file()), None)
    if found is None:
        raise UvFailed(f"uv is not in {places[0]}, where it belongs to llmgw: install llmgw again")
    return found


async def run_uv(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    progress: Progress = lambda stage, written: None,
    stall_s: float = STALL_S,
    limit_s: float = LIMIT_S,
) -> None:
    """Runs uv to its end; cancelled, it is killed with all that it has started. Raises UvFailed, OSError."""
    await _Run(progress, stall_s).run(arguments, env, cwd, limit_s)


class _Run:
    def __init__(self, progress: Progress, stall_s: float) -> None:
        self._progress = progress
        self._stall_s = stall_s
        self._lines: list[str] = []
        self._stage = ""
        self._written = 0
        self._spent = 0
        self._stall = asyncio.timeout(None)

    async def run(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, limit_s: float) -> None:
        # Whatever the agent's umask: the engine's user must be able to read what is written.
        argv = ["/bin/sh", "-c", 'umask 022; exec "$0" "$@"', str(program()), *arguments]
        limit = asyncio.timeout(limit_s)
        try:
            async with limit, self._stall, started(argv, env=env, cwd=str(cwd), merged=True) as uv:
                self._alive()
                status = await self._watch(uv)
        except TimeoutError:
            if limit.expired():
                raise UvFailed(f"it took longer than {limit_s:g} s") from None
            raise UvFailed(
                f"it stood still for {self._stall_s:g} s after {megabytes(self._written)}: {self._last()}"
            ) from None
        if status != 0:
            raise UvFailed(explain(self._lines, ending(status)))

    async def _watch(self, uv: asyncio.subprocess.Process) -> int:
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look(Path("/proc") / str(uv.pid)))
            assert uv.stdout is not None
            async for line in uv.stdout:
                self._hear(line.decode("utf-8", "replace").rstrip())
            status = await uv.wait()
            looking.cancel()
        return status

    def _hear(self, line: str) -> None:
        self._alive()
        self._lines.append(line)
        del self._lines[:-_OUTPUT_LINES]
        if found := _COUNT.match(line):
            self._stage = found[1].lower()
            self._progress(self._stage, self._written)

    async def _look(self, process: Path) -> None:
        """The kernel knows whether anything goes on, also in the middle of a large file."""
        while True:
            written, spent = _moved(process)
            if written > self._written or spent > self._spent + _BUSY_TICKS:
                self._alive()
                self._written, self._spent = max(written, self._written), spent
                self._progress(self._stage, self._written)
            await asyncio.sleep(LOOK_S)

    def _alive(self) -> None:
        self._stall.reschedule(asyncio.get_running_loop().time() + self._stall_s)

    def _last(self) -> str:
        return next((line.strip() for line in reversed(self._lines) if line.strip()), "it said nothing")


def _moved(process: Path) -> tuple[int, int]:
    """Bytes written and clock ticks spent by a process; zeros where it is gone."""
    try:
        io = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return int(io["wchar"]), int(fields[11]) + int(fields[12])
    except (OSError, ValueError, KeyError, IndexError):
        return 0, 0


_SIGNS = (
    ("No space left on device", "the disk became full: make room, or name another engines_dir in the agent's file"),
    ("Disk quota exceeded", "the disk quota is used up"),
    ("invalid peer certificate", "a certificate is not trusted here: name the authority in pip's configuration (cert)"),
    ("dns error", "a name can't be resolved"),
    ("failed to lookup address", "a name can't be resolved"),
    ("Connection refused", "a connection was refused"),
    ("Network is unreachable", "the network is unreachable"),
    ("tunnel error", "the proxy refused: look at HTTPS_PROXY and pip's configuration"),
    ("401 Unauthorized", "the index wants credentials: look at pip's configuration"),
    ("403 Forbidden", "the index refuses these credentials: look at pip's configuration"),
    ("operation timed out", "the index stopped answering"),
    ("error sending request", "the index can't be reached"),
    ("Connection reset", "the index broke the connection"),
)
_MISMATCH = re.compile(r"Hash mismatch for `([^`]+)`")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_ABSENT = re.compile(r"there (?:is|are) no versions? of (\S+?)(?:\{[^}]*\})?(==\S+)?[\s,.]")
_WHEELLESS = re.compile(r"Because (\S+?)(?:\{[^}]*\})?(==\S+)? has no (?:usable )?wheels")
_URL = re.compile(r"https?://[^\s`)]+")


def explain(lines: Sequence[str], end: str) -> str:
    """Why uv failed, of what it has printed. ``end`` says how it ended."""
    text = "\n".join(lines)
    if wrong := _MISMATCH.search(text):
        hashes = _SHA256.findall(text[wrong.end() :])
        expected, got = (hashes[:-1], hashes[-1]) if len(hashes) > 1 else (hashes, "another")
        return (
            f"{wrong[1]} is not the file that the lock names: sha256 {' or '.join(expected)} was expected and {got} "
            "came; nothing was installed. If a mirror serves it, mend the mirror"
        )
    for sign, words in _SIGNS:
        if sign in text:
            url = _URL.search(text)
            return f"{words}{f' ({url[0]})' if url else ''}"
    flat = " ".join(text.split()) + " "
    for pattern in (_ABSENT, _WHEELLESS):
        if absent := pattern.search(flat):
            name = f"{absent[1]}{absent[2] or ''}"
            return f"no index or find-links that this node's pip or uv is configured with has a wheel of {name}"
    told = [line.strip() for line in lines if line.strip().startswith(("error", "cause", "Caused by"))]
    told = told or [line.strip() for line in lines if line.strip()]
    return ": ".join(told[:3])[:500] or f"uv {end}"
