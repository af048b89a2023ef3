"""Where a shard's things lie.

    WORK_DIR/supervisor.lock                        held by the agent that runs
    WORK_DIR/processes/SHARD/work/                  the engine's own, unless its spec names another: HOME, key files,
                                                    caches; stays from one generation to the next
    WORK_DIR/processes/SHARD/GENERATION/record/     see llmgw.process.record
    WORK_DIR/processes/SHARD/GENERATION/log/        output.log, output.log.1 ...
    WORK_DIR/processes/SHARD/GENERATION/sidecars/NAME/{record,log}/    the same of a sidecar

SHARD is the shard's id with ``/`` as ``%2F``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from llmgw.agent.supervisor.spec import ENGINE
from llmgw.process.account import Account
from llmgw.process.errors import StartError

_SIDECARS = "sidecars"
_PART = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
_PASSABLE = 0o711
_LONGEST_NAME = 200


class Layout:
    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.shards = self.root / "processes"

    def shard(self, shard_id: str) -> Path:
        """Raises StartError where the id can't be a directory's name."""
        name = quote(shard_id, safe="")
        if not shard_id.strip(".") or len(name) > _LONGEST_NAME:
            raise StartError(f"{shard_id!r} can't be the id of a shard: expected REPLICA/RANK")
        return self.shards / name

    def work(self, shard_id: str) -> Path:
        return self.shard(shard_id) / "work"

    def generation(self, shard_id: str, generation: int) -> Path:
        return self.shard(shard_id) / str(generation)

    def part(self, shard_id: str, generation: int, part: str) -> Path:
        """Where one process of a generation has its own. Raises StartError where the name can't be a directory's."""
        generation_folder = self.generation(shard_id, generation)
        if part == ENGINE:
            return generation_folder
        if not _PART.fullmatch(part):
            raise StartError(f"{part!r} can't be the name of a sidecar: expected lower-case letters, digits, . and -")
        return generation_folder / _SIDECARS / part

    def record(self, shard_id: str, generation: int, part: str = ENGINE) -> Path:
        return self.part(shard_id, generation, part) / "record"

    def log(self, shard_id: str, generation: int, part: str = ENGINE) -> Path:
        return self.part(shard_id, generation, part) / "log" / "output.log"

    def found(self) -> Iterator[tuple[str, int, str]]:
        """Shard, generation and part of every process that has left something, in order."""
        with suppress(FileNotFoundError):
            for shard in sorted(self.shards.iterdir()):
                shard_id = unquote(shard.name)
                for number in self.generations(shard_id):
                    yield from ((shard_id, number, part) for part in self._parts(shard_id, number))

    def _parts(self, shard_id: str, generation: int) -> Iterator[str]:
        if self.record(shard_id, generation).is_dir():
            yield ENGINE
        with suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(entry.name for entry in (self.generation(shard_id, generation) / _SIDECARS).iterdir())
            yield from (name for name in names if _PART.fullmatch(name))

    def generations(self, shard_id: str) -> list[int]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(int(entry.name) for entry in self.shard(shard_id).iterdir() if entry.name.isdecimal())
        return []

    def check_work(self, shard_id: str, work: Path) -> Path:
        """Raises StartError for a work directory that is not the shard's own: it will be given away, and removed."""
        inside = Path(os.path.normpath(work))
        own = inside == self.work(shard_id)
        if not own and (self.root not in inside.parents or self.shards in (inside, *inside.parents)):
            raise StartError(
                f"the work directory of shard {shard_id} must lie below {self.root}, "
                f"outside {self.shards}; found {work}"
            )
        return inside

    def make(self, shard_id: str, generation: int, part: str, work: Path, owner: Account | None) -> None:
        """Make a process's directories. Those on the way to the work directory can be passed through by anyone."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        own = self.part(shard_id, generation, part)
        for directory in (self.shards, self.shard(shard_id), self.generation(shard_id, generation)):
            directory.mkdir(exist_ok=True)
            directory.chmod(_PASSABLE)
        own.mkdir(parents=True, exist_ok=True)
        work.parent.mkdir(parents=True, exist_ok=True, mode=_PASSABLE)
        work.mkdir(exist_ok=True, mode=0o700)
        if owner is not None:
            os.chown(work, owner.uid, owner.gid, follow_symlinks=False)
        self.record(shard_id, generation, part).mkdir(mode=0o700)
        self.log(shard_id, generation, part).parent.mkdir(mode=0o700)

    def remove_part(self, shard_id: str, generation: int, part: str) -> None:
        """What one process has left; with the last of them goes its generation's directory."""
        for folder in (self.record(shard_id, generation, part), self.log(shard_id, generation, part).parent):
            shutil.rmtree(folder, ignore_errors=True)
        generation_folder = self.generation(shard_id, generation)
        for folder in (self.part(shard_id, generation, part), generation_folder / _SIDECARS, generation_folder):
            with suppress(OSError):
                folder.rmdir()

    def remove_generation(self, shard_id: str, generation: int) -> None:
        shutil.rmtree(self.generation(shard_id, generation), ignore_errors=True)

    def remove(self, shard_id: str) -> None:
        shutil.rmtree(self.shard(shard_id), ignore_errors=True)


def write_files(work: Path, files: Mapping[str, str], owner: Account | None) -> None:
    """Write an engine's files: 0600, its own. Raises StartError for one that would lie outside ``work``."""
    for name, text in files.items():
        inside = Path(os.path.normpath(work / name))
        if work not in inside.parents:
            raise StartError(f"the file {name} lies outside the shard's work directory {work}")
        _write(work, inside.relative_to(work), text, owner)


def _write(work: Path, relative: Path, text: str, owner: Account | None) -> None:
    """The engine owns the directory and may have put links there: none is followed on the way."""
    directory = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for part in relative.parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=directory)
                if owner is not None:
                    os.chown(part, owner.uid, owner.gid, dir_fd=directory, follow_symlinks=False)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
        with suppress(FileNotFoundError):
            os.unlink(relative.name, dir_fd=directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(relative.name, flags, 0o600, dir_fd=directory)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            if owner is not None:
                os.fchown(file.fileno(), owner.uid, owner.gid)
    finally:
        os.close(directory)
