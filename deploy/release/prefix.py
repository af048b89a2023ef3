"""The folder that a release unpacks: a Python that can lie anywhere, with its libraries, llmgw and what llmgw needs.

    bin/python3.11, bin/uv
    lib/python3.11/                  the standard library
    lib/python3.11/dist-packages/    llmgw, and the packages of its lock
    lib/native/                      libraries that Python's modules need
    include/python3.11/              for engines, which compile in environments made from this Python

A Python that is started finds its library beside itself, whatever the environment says; its modules find theirs by a
path relative to themselves that is written into them. So each ``sys.executable -m …`` and ``-I`` just work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.release import archive, debian, elf, wheels

PYTHON = f"python{wheels.PYTHON}"
PACKAGES = Path("lib") / PYTHON / "dist-packages"
_NATIVE = Path("lib/native")
_MULTIARCH = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_LEFT_OUT = ("test", "idlelib", "lib2to3", "pydoc_data", "sitecustomize.py", "EXTERNALLY-MANAGED", "__pycache__")
_MODULES_LEFT_OUT = ("_dbm", "nis", "_testcapi", "_testclinic", "_testbuffer", "_testimportmultiple", "_testmultiphase")
"""Those that need libraries of their own, which nothing here uses."""
_OF_THE_SYSTEM = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1")
_LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
_ESSENTIAL = ("libgcc_s.so.1", "libcrypt.so.1", "libstdc++.so.6")
"""Every Debian and Ubuntu has them: libc, perl and apt need them."""
_USER_SITE = "\nENABLE_USER_SITE = None\n"


class PrefixRefused(Exception):
    """The folder would not run where it has to; the message says what is wrong."""


def make(folder: Path, debs: list[Path], packages: list[wheels.Wheel], architecture: str) -> None:
    """Fills ``folder``. Raises PrefixRefused."""
    root = folder.with_name(folder.name + ".debian")
    for old in (folder, root):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    debian.unpack(debs, root)
    _put_python(folder, root, _MULTIARCH[architecture])
    for wheel in packages:
        wheels.install(wheel, folder / PACKAGES, folder / "bin")
    shutil.rmtree(root)
    _lead_to_libraries(folder)
    check(folder, architecture)


def _put_python(folder: Path, root: Path, multiarch: str) -> None:
    (folder / "bin").mkdir()
    shutil.copy2(root / "usr/bin" / PYTHON, folder / "bin" / PYTHON)
    for name in ("python3", "python"):
        (folder / "bin" / name).symlink_to(PYTHON)
    library = folder / "lib" / PYTHON
    shutil.copytree(
        root / "usr/lib" / PYTHON, library, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT, "config-3.11-*")
    )
    for module in _MODULES_LEFT_OUT:
        for file in (library / "lib-dynload").glob(f"{module}.*.so"):
            file.unlink()
    _forget_users(library / "site.py")
    headers = folder / "include" / PYTHON
    shutil.copytree(root / "usr/include" / PYTHON, headers)
    # Debian's leads to one of several architectures, in a place of the system's.
    shutil.copy2(root / "usr/include" / multiarch / PYTHON / "pyconfig.h", headers / "pyconfig.h")
    _put_libraries(folder / _NATIVE, [root / "lib" / multiarch, root / "usr/lib" / multiarch])


def _forget_users(site: Path) -> None:
    """What a user has installed for Debian's Python is not for this one, with whatever options it is started."""
    text = site.read_text(encoding="utf-8")
    if text.count(_USER_SITE) != 1:
        raise PrefixRefused(f"{site.name} does not say {_USER_SITE.strip()!r} once: where does it turn it on?")
    site.write_text(text.replace(_USER_SITE, "\nENABLE_USER_SITE = False\n"), encoding="utf-8")


def _put_libraries(native: Path, places: list[Path]) -> None:
    native.mkdir()
    for place in places:
        for library in sorted(place.glob("*.so.*")):
            if not library.name.startswith("libpython"):
                shutil.copy2(library, native / library.name, follow_symlinks=True)
    # Each under the one name that it is asked for by.
    for library in sorted(native.iterdir()):
        if not _is_asked_for(library):
            library.unlink()


def _is_asked_for(library: Path) -> bool:
    words = ["patchelf", "--print-soname", str(library)]
    return _patchelf(words).strip() == library.name


def _lead_to_libraries(folder: Path) -> None:
    native = folder / _NATIVE
    places = [folder / "bin" / PYTHON, *(folder / "lib" / PYTHON / "lib-dynload").glob("*.so"), *native.iterdir()]
    for file in sorted(places):
        way = os.path.relpath(native, file.parent)
        _patchelf(["patchelf", "--set-rpath", "$ORIGIN" if way == "." else f"$ORIGIN/{way}", str(file)])


def check(folder: Path, architecture: str) -> tuple[int, int]:
    """That all compiled files are for this architecture, need no newer libc than the oldest system has, and no library
    but what is in the folder or in every system. Returns the libc that is needed. Raises PrefixRefused."""
    brought = {path.name for path in (folder / _NATIVE).iterdir()}
    faults: list[str] = []
    newest = (0, 0)
    for path in archive.walk(folder):
        if path.is_symlink() or not path.is_file() or not elf.is_elf(path):
            continue
        name = path.relative_to(folder)
        found = elf.read(path.read_bytes())
        newest = max(newest, found.glibc)
        if found.machine != architecture:
            faults.append(f"{name} is for {found.machine}")
        if found.glibc > wheels.GLIBC:
            faults.append(f"{name} needs GLIBC_{found.glibc[0]}.{found.glibc[1]}")
        usual = {*_OF_THE_SYSTEM, *_LOADERS, *_ESSENTIAL, *(brought if found.runpath else ())}
        beside = {other.name for other in path.parent.iterdir()} | _bundled(path)
        faults += [f"{name} needs {library}" for library in found.needed if library not in usual | beside]
    if faults:
        oldest = ".".join(map(str, wheels.GLIBC))
        raise PrefixRefused(f"it would not run on every {architecture} system with glibc {oldest}: {'; '.join(faults)}")
    return newest


def _bundled(path: Path) -> set[str]:
    """The libraries that a wheel brings, in a folder ``PACKAGE.libs`` beside the package."""
    return {library.name for parent in path.parents for place in parent.glob("*.libs") for library in place.iterdir()}


def compile_all(folder: Path, python: Path, epoch_s: int) -> None:
    """Compiles all modules, so that no start does it again. ``python``: one that runs here. Same input, same bytes."""
    library = folder / "lib" / PYTHON
    # Without -B it would keep what it imports itself, of now and with this folder's path in it.
    ended = subprocess.run(
        [
            *(str(python), "-B", "-s", "-P", "-S", "-m", "compileall", "-qq", "--invalidation-mode", "unchecked-hash"),
            *("-s", str(folder), "-p", "/", str(library)),
        ],
        env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": str(epoch_s)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Packages hold templates that are named like modules and are none.
    if not any(library.glob("__pycache__/os.*.pyc")):
        raise PrefixRefused(f"{python} compiles nothing: {ended.stderr.strip()[-1000:]}")


def _patchelf(words: list[str]) -> str:
    program = Path(sys.executable).parent / words[0]
    ended = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise PrefixRefused(f"`{' '.join(words)}`: {ended.stderr.strip()}")
    return ended.stdout
