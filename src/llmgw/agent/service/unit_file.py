"""The agent's unit on the disk. One that somebody else wrote is neither overwritten nor removed."""

from __future__ import annotations

from pathlib import Path

from llmgw.agent.service.systemd import UNIT_FILE, ServiceRefused
from llmgw.agent.service.unit import MARK
from llmgw.private_file import write_whole


def is_there(path: Path = UNIT_FILE) -> bool:
    """Also where it is a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def read(path: Path = UNIT_FILE) -> str:
    """Empty where there is none. Raises ServiceRefused where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ServiceRefused(f"{path} can't be read: {error.strerror}") from error


def put(text: str, path: Path = UNIT_FILE) -> list[str]:
    """Have it say ``text``; what was done, in sentences. A stranger's is kept beside it. Raises ServiceRefused."""
    found = read(path)
    if found == text and not path.is_symlink():
        return []
    done = []
    try:
        if is_there(path) and not found.startswith(MARK):
            kept = kept_as(path)
            path.rename(kept)
            done.append(f"the unit that somebody else had put there is at {kept} now")
        write_whole(path, text, 0o644)  # systemd may read it at any moment
    except OSError as error:
        raise ServiceRefused(f"{path} can't be written: {error.strerror}") from error
    return [*done, f"wrote {path}"]


def kept_as(path: Path = UNIT_FILE) -> Path:
    """Where a stranger's unit goes that was in the way. systemd reads no file of such a name."""
    return path.with_name(f"{path.name}.replaced")
