"""A machine over the OpenSSH client: commands as root, one connection for all of them, host keys learned once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

CONNECT_S = 10
"""How long ssh itself tries to connect."""
RETRY_S = 5.0
COMMAND_S = 120.0
"""How long a command on the machine may take, unless something else is said."""
_SSH_FAILED = 255
_MAX_OUTPUT = 1 << 20
_LEARNED = "Warning: Permanently added "
_CHANGED = ("REMOTE HOST IDENTIFICATION HAS CHANGED", "Host key verification failed")


class Unreachable(Exception):
    """The machine can't be reached over ssh; the message says what was seen. ``final``: waiting does not help."""

    def __init__(self, seen: str, *, final: bool = False) -> None:
        super().__init__(seen)
        self.final = final


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command on the machine, ended. ``errors``: what it wrote to its error output."""

    status: int
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        """The last line that it said, for people."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status} and said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How the machine is reached. ``options``: more of ssh's, such as ``ProxyJump=bastion`` (``ssh -o``)."""

    host: str
    user: str = "llmgw"
    port: int = 22
    options: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.user}@{self.host}"

    def command(self, *more: str) -> list[str]:
        port = [] if self.port == 22 else ["-p", str(self.port)]
        given = [word for option in self.options for word in ("-o", option)]
        return ["ssh", *given, *more, *port, str(self)]

    def shown(self, command: str) -> str:
        """What a person types to run the command there."""
        return shlex.join([*self.command(), command])


@dataclass(slots=True)
class Remote:
    """The machine. Used as an asynchronous context: its connection ends with it."""

    login: Login
    _folder: Path | None = field(default=None, init=False)

    async def __aenter__(self) -> Remote:
        # Short: it becomes the path of a socket. Closed to others: who has the socket has the machine.
        self._folder = Path(tempfile.mkdtemp(prefix="llmgw-ssh-", dir=os.environ.get("XDG_RUNTIME_DIR") or None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._folder is not None
        try:
            if any(self._folder.iterdir()):
                with contextlib.suppress(Unreachable):
                    await self._ssh(["-O", "exit"], [], b"", limit_s=CONNECT_S)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def wait(self, limit_s: float) -> None:
        """Returns once the machine takes a command.

        For the first minute of its life a machine makes its host keys and starts its sshd anew: it refuses what it
        took a moment before. Raises Unreachable once the time is over, and at once where its host key has changed.
        """
        end = time.monotonic() + limit_s
        while True:
            tried = time.monotonic()
            try:
                await self.run("true", limit_s=CONNECT_S + 5)
                return
            except Unreachable as error:
                if error.final or tried + RETRY_S > end:
                    raise
            await asyncio.sleep(max(tried + RETRY_S - time.monotonic(), 0.0))

    async def run(self, command: str, data: bytes = b"", *, limit_s: float = COMMAND_S) -> Ran:
        """A command for the user's shell there, ``data`` on its standard input. Raises Unreachable."""
        ran = await self._ssh([], [command], data, limit_s=limit_s)
        if ran.status == _SSH_FAILED:
            raise _unreachable(self.login, ran.errors)
        return ran

    async def root(self, script: str, *words: str, data: bytes = b"", limit_s: float = COMMAND_S) -> Ran:
        """A POSIX shell script as root, ``words`` its parameters. Raises Unreachable."""
        as_root = [] if self.login.user == "root" else ["sudo", "-n"]
        return await self.run(shlex.join([*as_root, "sh", "-c", script, "llmgw", *words]), data, limit_s=limit_s)

    async def _ssh(self, options: Sequence[str], command: Sequence[str], data: bytes, *, limit_s: float) -> Ran:
        assert self._folder is not None
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_S),
            "StrictHostKeyChecking": "accept-new",
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": str(self._folder / "s"),
            "ControlPersist": "60",
            "RequestTTY": "no",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "LogLevel": "INFO",
        }
        stated = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        argv = [*self.login.command(*stated, *options), *command]
        # The process that holds the connection keeps what it inherits: its words go to a file, not to a pipe that
        # would stay open for as long as it lives.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True
                )
            except FileNotFoundError:
                raise Unreachable("there is no `ssh` on this machine: install the OpenSSH client", final=True) from None
            try:
                async with asyncio.timeout(limit_s):
                    await process.communicate(data)
            except TimeoutError:
                raise Unreachable(f"{self.login} did not end `{_short(command)}` within {limit_s:g} s") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode is not None
            said = [line for line in _text(errors).splitlines() if not line.startswith(_LEARNED)]
            return Ran(status=process.returncode, output=_text(output), errors="\n".join(said).rstrip())


def _text(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return bytes(file.read(_MAX_OUTPUT)).decode("utf-8", "replace")  # type: ignore[attr-defined]


def _short(command: Sequence[str]) -> str:
    return " ".join(command)[:60] or "the connection"


def _unreachable(login: Login, errors: str) -> Unreachable:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any(mark in errors for mark in _CHANGED):
        known = f"ssh-keygen -R {shlex.quote(login.host if login.port == 22 else f'[{login.host}]:{login.port}')}"
        return Unreachable(
            f"{login.host} shows another host key than the one that is known of it: another machine answers at that "
            f"address, or it was made anew. Nothing was sent to it. If it was made anew, `{known}` forgets the old key",
            final=True,
        )
    if "Bad configuration option" in errors or "command-line line" in errors:
        return Unreachable(f"ssh refuses its options: {lines[0]}", final=True)
    return Unreachable(lines[-1] if lines else "ssh ended without a word")
