"""An OS package is removed under an installed engine: in a root of its own, with the real dpkg and apt-get.

The root is the machine's, with a layer over it that goes when the test ends. apt-get asks the machine's own sources.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import Installed

DEADLINE_S = 120.0
ROOT = Path(__file__).resolve().parents[3]

# In namespaces of its own, so that all of it goes with the last process.
_IN_A_ROOT = """
set -e
mount -t tmpfs -o size=2g tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount --rbind /sys "$1/root/sys"
cd "$2"
root="$1/root"; home="$2"; shift 2
exec chroot "$root" /bin/sh -c 'cd "$0"; exec "$@"' "$home" "$@"
"""


def _hindrance() -> str | None:
    if os.geteuid() != 0:
        return "needs root: packages are removed and installed, in a root of the test's own"
    if shutil.which("apt-get") is None or not Path("/var/lib/dpkg/info/libgomp1:amd64.list").exists():
        return "needs a Debian with libgomp1"
    return None


needs_debian = pytest.mark.skipif(_hindrance() is not None, reason=_hindrance() or "")


async def lost(installed: Installed, tmp_path: Path, how: str) -> list[tuple[str, str]]:
    """What the node said from the moment on at which the library was gone."""
    (tmp_path / "layer").mkdir()
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", _IN_A_ROOT, "sh"),
        *(str(tmp_path / "layer"), str(ROOT)),
        *(sys.executable, "-m", "tests.agent.install.lost_library", str(installed.engines_dir.parent), how),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 and b"mount:" in err:
        pytest.skip(f"this machine allows no root of its own: {err.decode().strip()}")
    assert process.returncode == 0, err.decode()
    return [tuple(json.loads(line)) for line in out.decode().splitlines() if line.startswith("[")]


@needs_debian
async def test_it_is_said_within_one_check_and_heals_by_itself(installed: Installed, tmp_path: Path) -> None:
    said = await lost(installed, tmp_path, "installed")
    state, words = said[0]
    assert state == "failed"
    assert words.startswith("libgomp.so.1, which ")
    assert "can't be found: it is in the package libgomp1 (apt-get install libgomp1)" in words
    if said[-1][0] == "failed" and "Could not resolve" in said[-1][1]:
        pytest.skip(f"the machine's package sources do not answer: {said[-1][1]}")
    assert ("os-packages", "installing libgomp1 (apt-get)") in said
    assert said[-1] == ("installed", "")
    assert Path("/var/lib/dpkg/info/libgomp1:amd64.list").exists()  # of the machine itself


@needs_debian
async def test_a_named_binary_without_apt_names_library_and_package(installed: Installed, tmp_path: Path) -> None:
    state, words = (await lost(installed, tmp_path, "named"))[-1]
    assert state == "failed"
    assert words.startswith("engines.llamacpp.bin in the agent's file names ")
    assert "libgomp.so.1, which " in words
    assert "it is in the package libgomp1 (apt-get install libgomp1)" in words
    assert "there is no apt-get on this node: install libgomp1 by hand; next try in" in words
