"""What an archive left in its folder, written down so that damage can be told later."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.agent.fetch.disk import sha256_of, write_durably

CONTENTS = "CONTENTS.sha256"
"""In the form that ``sha256sum --check`` reads; links are remarks in it."""

_LINK = "# link "
_TO = " -> "


@dataclass(frozen=True, slots=True)
class Contents:
    files: dict[str, str] = field(default_factory=dict)
    """sha256 by path below the folder, parts divided by ``/``."""
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links and what they lead to, beside them."""

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """As written down in ``folder``; empty where nothing is. Raises OSError."""
        read = cls()
        try:
            text = (folder / CONTENTS).read_text()
        except FileNotFoundError:
            return read
        for line in text.splitlines():
            if line.startswith(_LINK):
                name, _, target = line.removeprefix(_LINK).partition(_TO)
                read.links[name] = target
            elif line:
                digest, _, name = line.partition("  ")
                read.files[name] = digest
        return read

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        lines = [f"{digest}  {name}" for name, digest in sorted(self.files.items())]
        lines += [f"{_LINK}{name}{_TO}{target}" for name, target in sorted(self.links.items())]
        write_durably(folder / CONTENTS, "".join(f"{line}\n" for line in lines).encode())

    def below(self, top: str) -> Contents:
        """As seen from ``top``, in which everything is."""
        cut = len(top) + 1 if top else 0
        return Contents(
            {name[cut:]: digest for name, digest in self.files.items()},
            {name[cut:]: target for name, target in self.links.items()},
        )

    def and_also(self, others: Contents) -> Contents:
        return Contents({**self.files, **others.files}, {**self.links, **others.links})


def damage(folder: Path, stopped: Callable[[], bool] = lambda: False) -> str | None:
    """What differs in an unpacked archive from what was unpacked, in words; None where nothing does.

    Meant for a thread: it reads everything. Raises Stopped.
    """
    try:
        contents = Contents.of(folder)
        if not contents.files:
            contents.files.update(_recorded(folder))
    except (OSError, ValueError) as error:
        return f"what was unpacked into {folder} is written down nowhere: {error}"
    for name, target in contents.links.items():
        path = folder / name
        try:
            if str(path.readlink()) != target:
                return f"{path} leads elsewhere since it was installed"
        except OSError as error:
            return f"{path}: {error.strerror}"
    for name, wanted in contents.files.items():
        path = folder / name
        try:
            if sha256_of(path, stopped) != wanted:
                return f"{path} has changed since it was installed"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return None


def _recorded(folder: Path) -> Iterator[tuple[str, str]]:
    """Of a wheel by its own record: those unpacked by earlier releases have no other."""
    records = list(folder.glob("*.dist-info/RECORD"))
    if len(records) != 1:
        raise FileNotFoundError(f"it has neither {CONTENTS} nor a RECORD")
    with records[0].open(newline="") as file:
        for row in csv.reader(file):
            if len(row) > 1 and row[1].startswith("sha256="):
                yield row[0], base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "==").hex()
