"""What an agent leaves on its machine, for the machine's owner to keep or to remove."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.exposure import find_nft
from llmgw.agent.service import unit_file
from llmgw.agent.supervisor.engine_user import ENGINE_USER
from llmgw.config import AgentConfig
from llmgw.process.account import account
from llmgw.process.errors import StartError

WEIGHTS_DIR = Path("/var/lib/llmgw-weights")
ENGINES_DIR = Path("/opt/llmgw/engines")
RELEASES_DIR = Path("/usr/local/lib/llmgw")
TRUSTED = Path("/usr/local/share/ca-certificates/llmgw-ca.crt")


@dataclass(frozen=True, slots=True)
class Left:
    """``what`` it is, how much of the disk it takes (0 where it takes none to speak of), and what removes it."""

    what: str
    size_bytes: int
    remove: str


def left_behind(config: Path, work_dir: Path, read: AgentConfig | None) -> tuple[Left, ...]:
    """In the order in which it is removed. Walks through the folders, so it may take a while."""
    weights = read.weights_dir if read is not None else WEIGHTS_DIR
    engines = read.engines_dir if read is not None else ENGINES_DIR
    found = [
        *_folder(engines, "engines"),
        *_folder(weights, "weights"),
        *_folder(work_dir, "its state: certificates and keys (identity/), what engines wrote, downloads"),
        *_file(config, "its file"),
        *_file(unit_file.kept_as(), "the unit that was there before it"),
        *_folder(RELEASES_DIR, "llmgw itself, unpacked"),
        *_trusted(),
        *_table(read),
        *_user(),
    ]
    return tuple(found)


def _folder(path: Path, what: str) -> Iterator[Left]:
    if path.is_dir():
        yield Left(f"{path}: {what}", size_bytes(path), f"rm -r {shlex.quote(str(path))}")


def _file(path: Path, what: str) -> Iterator[Left]:
    if path.exists():
        yield Left(f"{path}: {what}", 0, f"rm {shlex.quote(str(path))}")


def _trusted() -> Iterator[Left]:
    if TRUSTED.exists():
        yield Left(
            f"{TRUSTED}: the cluster's authority, which the whole machine trusts",
            0,
            f"rm {TRUSTED} && update-ca-certificates --fresh",
        )


def _table(read: AgentConfig | None) -> Iterator[Left]:
    """The table of packet filters around engines' ports: an agent that stops leaves it, its engines being there."""
    nft = find_nft()
    table = f"llmgw-{(read.node_id if read is not None else None) or socket.gethostname()}"
    if nft is None:
        return
    with suppress(OSError, subprocess.TimeoutExpired):
        shown = subprocess.run(
            [nft, "list", "table", "inet", table],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=10,
            check=False,
        )
        if shown.returncode == 0:
            yield Left(
                f"packet filters around engines' ports (nft list table inet {table})",
                0,
                f"nft delete table inet {table}",
            )


def _user() -> Iterator[Left]:
    with suppress(StartError):
        account(ENGINE_USER)
        yield Left(f"the user {ENGINE_USER}, as which engines ran", 0, f"userdel {ENGINE_USER}")


def size_bytes(folder: Path) -> int:
    """What it takes of the disk; links are not followed, and what can't be looked at counts as nothing."""
    total, seen = 0, set[tuple[int, int]]()
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if (status.st_dev, status.st_ino) not in seen:
                    total += status.st_blocks * 512
                if status.st_nlink > 1:
                    seen.add((status.st_dev, status.st_ino))
    return total
