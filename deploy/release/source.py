"""What is built: this checkout, its version, and the wheel of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from llmgw.version import VERSION, of_checkout

_BUILT_FROM = ("src", "pyproject.toml", "requirements", "deploy/release", "README.md", "LICENSE")


class SourceRefused(Exception):
    """The checkout is not what a release can be built from; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """``epoch_s``: when its last commit was made, which all built files are said to be from."""

    root: Path
    version: str
    epoch_s: int


def look(root: Path) -> Source:
    """A commit that carries the tag of its version, unchanged, is a release. Raises SourceRefused."""
    epoch_s = int(_git(root, "log", "-1", "--format=%ct"))
    changed = _git(root, "status", "--porcelain", "--", *_BUILT_FROM)
    tags = [tag for tag in _git(root, "tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    own = f"v{VERSION}"
    if not tags:
        version = of_checkout(root)
        return Source(root, f"{version}.changed" if changed else version, epoch_s)
    if own not in tags:
        raise SourceRefused(
            f"this commit is tagged {tags[0]}, and llmgw/version.py says VERSION = {VERSION!r}: set it to "
            f"{tags[0].removeprefix('v')!r}, commit, and tag that commit"
        )
    if changed:
        raise SourceRefused(
            f"this is {own}, but not as it was committed:\n{changed}\n"
            "Commit or undo that: a release is what its tag says"
        )
    return Source(root, own, epoch_s)


def build_wheel(source: Source, folder: Path, releases: str) -> Path:
    """The wheel, which says which build it is. ``folder``: where it is built; it is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(source.root / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(source.root / name, tree / name)
    build = {"version": source.version, "releases": releases}
    (tree / "src/llmgw/build.json").write_text(f"{json.dumps(build)}\n", encoding="utf-8")
    for path in tree.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--no-build-isolation", "--wheel-dir", str(folder), str(tree)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SourceRefused(f"the wheel can't be built: {ended.stderr.strip()[-2000:]}")
    return next(folder.glob("*.whl"))


def _git(root: Path, *words: str) -> str:
    ended = subprocess.run(
        ["git", "-c", f"safe.directory={root}", "-C", root, *words], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise SourceRefused(f"{root} is no checkout that git knows: {ended.stderr.strip()}")
    return ended.stdout.strip()
