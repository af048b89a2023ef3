"""Whether a machine answers by ssh, and is the one that it should be: the one that has the host key made for it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SSH_PORT = 22
_RETRY_S = 0.5
_CONNECT_S = 5
_PEEK_S = 1.5


class NoAnswer(Exception):
    """Nobody answered in time, or somebody else did; the message says what was seen last."""


async def taken(host: str, port: int = SSH_PORT) -> bool:
    """Whether some machine has the address already and answers there by ssh.

    A refusal says nothing: where a firewall is between, it is the firewall's.
    """
    try:
        async with asyncio.timeout(_PEEK_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


async def wait_for(host: str, public: str, *, limit_s: float, port: int = SSH_PORT) -> None:
    """Returns once sshd at ``host`` proves that it holds the key ``public``. Raises NoAnswer.

    For that nobody need be let in: the proof comes before.
    """
    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="llmgw-ssh-") as folder:
        known = Path(folder) / "known_hosts"
        known.write_text(f"{_named(host, port)} {public}\n", encoding="utf-8")
        while True:
            seen = await _try(host, port, known)
            if seen is None:
                return
            if time.monotonic() + _RETRY_S > end:
                raise NoAnswer(f"{host} did not answer by ssh within {limit_s:g} s: {seen}")
            await asyncio.sleep(_RETRY_S)


async def remember(host: str, name: str, public: str, known_hosts: Path, port: int = SSH_PORT) -> None:
    """Writes the key of a machine made just now into ``known_hosts``, in place of what was known of its address.

    Raises OSError.
    """
    known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = [_named(known, port) for known in (host, name)]
    for known in names:
        if known_hosts.exists():
            await _run("ssh-keygen", "-q", "-R", known, "-f", str(known_hosts))
    with known_hosts.open("a", encoding="utf-8") as file:
        file.write(f"{','.join(names)} {public}\n")


async def _try(host: str, port: int, known: Path) -> str | None:
    """None where the key is proved, else what was seen."""
    said = await _run(
        "ssh",
        *("-F", "none", "-p", str(port)),
        *_settings(
            BatchMode="yes",
            StrictHostKeyChecking="yes",
            UserKnownHostsFile=str(known),
            GlobalKnownHostsFile="none",
            HostKeyAlgorithms="ssh-ed25519",
            PreferredAuthentications="none",
            ConnectTimeout=str(_CONNECT_S),
            ControlPath="none",
            LogLevel="INFO",
        ),
        f"nobody@{host}",
        "true",
    )
    if "Permission denied" in said:
        return None
    if "Host key verification failed" in said or "no matching host key" in said:
        return (
            "what answers there shows another host key: another machine, or one that has not read its first boot's data"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "ssh ended without a word"


def _settings(**settings: str) -> list[str]:
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


async def _run(*command: str) -> str:
    """What the command complains of."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise NoAnswer(f"there is no {command[0]} on this machine: install the OpenSSH client") from None
    try:
        _, complaints = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return complaints.decode("utf-8", "replace")


def _named(host: str, port: int) -> str:
    return host if port == SSH_PORT else f"[{host}]:{port}"
