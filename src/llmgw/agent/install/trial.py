"""Programs that are tried out: as the user that engines run as, so that what it may not do shows before it matters.

That user is the owner of the folder they are tried in. Where the agent is not root, or the folder is root's, they run
as the agent does.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch import child
from llmgw.agent.fetch.child import Ended
from llmgw.agent.install.faults import NotProved
from llmgw.process import run_as

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def own(folder: Path, user: str | None) -> None:
    """Makes ``folder`` the one where programs are tried as ``user``; None: as the agent. Raises OSError, KeyError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.geteuid() == 0:
        entry = pwd.getpwnam(user) if user else pwd.getpwuid(0)
        os.chown(folder, entry.pw_uid, entry.pw_gid)


@dataclass(frozen=True, slots=True)
class Trial:
    """A folder that lasts as long as the trial; everything that runs in it has it for its home."""

    folder: Path
    reads: tuple[Path, ...]
    """Files and folders outside of it that the programs must be able to read."""
    user: str | None
    _descriptor: int
    """Of the folder. What runs in it may put links in its files' places, and the agent is root: it goes by no path."""

    @property
    def environment(self) -> dict[str, str]:
        home = str(self.folder)
        return {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "GGML_NO_BACKTRACE": "1"}

    def write(self, name: str, content: bytes) -> Path:
        """A new file that the programs may read. Raises OSError, also where they have put something in its place."""
        descriptor = os.open(name, _NEW_FILE, 0o600, dir_fd=self._descriptor)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if self.user is not None:
                os.fchown(descriptor, os.fstat(self._descriptor).st_uid, -1)
        return self.folder / name

    async def run(self, argv: Sequence[str], *, limit_s: float, env: dict[str, str] | None = None) -> Ended:
        """Raises OSError."""
        return await child.run(
            self._command(argv), env={**self.environment, **(env or {})}, limit_s=limit_s, cwd=str(self.folder)
        )

    @asynccontextmanager
    async def started(self, argv: Sequence[str], *, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
        """Runs it while the block does, its stderr where stdout goes. Raises OSError."""
        environment = {**self.environment, **env}
        async with child.started(self._command(argv), env=environment, cwd=str(self.folder), merged=True) as process:
            yield process

    def _command(self, argv: Sequence[str]) -> Sequence[str]:
        if self.user is None:
            return argv
        return run_as.command(argv, user=self.user, reads=self.reads, writes=(self.folder,), parent=os.getpid())


@contextmanager
def trial(under: Path, reads: Sequence[Path]) -> Iterator[Trial]:
    """A trial in a new folder in ``under``, as the user that owns ``under``. Raises NotProved, OSError."""
    under.mkdir(parents=True, exist_ok=True)
    owner = under.stat()
    user = _name(owner.st_uid) if os.geteuid() == 0 and owner.st_uid != 0 else None
    with tempfile.TemporaryDirectory(dir=under) as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if user is not None:
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            yield Trial(Path(folder), tuple(reads), user, descriptor)
        finally:
            os.close(descriptor)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise NotProved(f"engines are to be tried as user {uid}, and this machine has no such user") from None
