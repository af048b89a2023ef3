"""Which llmgw this is. A build carries ``build.json`` beside this file; a checkout asks git."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VERSION = "0.1.0"
BUILD_FILE = Path(__file__).with_name("build.json")
"""``{"version": "v0.1.0", "releases": URL}``, written when a release is built."""
_GIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Version:
    """``text``: ``v0.1.0`` of a release, else ``v0.1.0+COMMITS.HASH``."""

    text: str
    releases: str = ""
    """Where the releases of this project are; empty: the build does not know."""
    file: Path | None = None
    """The one file that this program was unpacked from; None where it runs from its sources."""

    @property
    def is_release(self) -> bool:
        return "+" not in self.text


@cache
def version() -> Version:
    """Never raises: what can't be found out is `unknown`."""
    packed = os.environ.get("LLMGW_FILE")
    file = Path(packed) if packed else None
    try:
        build = json.loads(BUILD_FILE.read_text(encoding="utf-8"))
        return Version(str(build["version"]), str(build["releases"]), file)
    except (OSError, ValueError, KeyError):
        return Version(of_checkout(Path(__file__).parents[2]), file=file)


def of_checkout(root: Path) -> str:
    """``v0.1.0+COMMITS.HASH`` of a working tree: commits since the release of this version, or ever where there is
    none. A tree is no release, even where a tag is on it: what runs may be something that nobody else has."""
    unknown = f"v{VERSION}+unknown"
    if not (root / ".git").exists():
        return unknown
    tagged = _git(root, "rev-parse", "--quiet", "--verify", f"refs/tags/v{VERSION}")
    commits = _git(root, "rev-list", "--count", f"v{VERSION}..HEAD" if tagged else "HEAD")
    head = _git(root, "rev-parse", "--short=7", "HEAD")
    return f"v{VERSION}+{commits}.{head}" if commits and head else unknown


def _git(root: Path, *words: str) -> str:
    # Another user's checkout is asked no less: nothing of it is run.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.decode("utf-8", "replace").strip() if ended.returncode == 0 else ""
