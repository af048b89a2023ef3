"""A release as it is used, in systems that have nothing but what every Debian and Ubuntu has. As root; minutes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
# /tmp can't be executed from, and there are no devices and no network but a loopback of its own.
_ENTER = """
set -e
mkdir -p "$0/tmp"
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount --make-rslave "$0/dev"
mount -t tmpfs -o noexec,nosuid tmpfs "$0/tmp"
ip link set lo up
exec chroot "$0" /usr/bin/env -i "$@"
"""
_ASK = """
import json, sys, urllib.request
body = json.dumps({"model": sys.argv[3], "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}).encode()
headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""


def own_file(built: Path) -> Path:
    (file,) = built.glob(f"llmgw-*-linux-{OWN}")
    return file


def install(file: Path, tree: Path) -> None:
    partial = tree / "usr/local/bin/.llmgw"
    shutil.copy2(file, partial)
    os.replace(partial, tree / "usr/local/bin/llmgw")


def enter(tree: Path, *words: str) -> list[str]:
    return ["unshare", "-mpnuif", "--kill-child", "sh", "-c", _ENTER, str(tree), *words]


def run(tree: Path, *words: str) -> str:
    ended = subprocess.run(enter(tree, *words), capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_the_files_are_what_the_checksums_say(built: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "checksums.txt"], cwd=built, check=True)
    named = {line.split()[1] for line in (built / "checksums.txt").read_text().splitlines()}
    assert named == {file.name for file in built.iterdir()} - {"checksums.txt"}


def test_the_sbom_is_of_the_file(built: Path) -> None:
    file = own_file(built)
    document = json.loads(file.with_name(f"{file.name}.cdx.json").read_text())
    (stated,) = document["metadata"]["component"]["hashes"]
    assert stated["content"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert {"cryptography", "libssl3", "uv"} <= {component["name"] for component in document["components"]}


def test_built_again_it_is_the_same(built: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.release", "build", "--arch", OWN, "--out", str(tmp_path)]
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        releases = json.loads(content.read("llmgw/build.json"))["releases"]
    subprocess.run([*command, "--releases", releases], cwd=ROOT, check=True)
    again = next(tmp_path.iterdir())
    assert own_file(again).read_bytes() == own_file(built).read_bytes()
    for wheel in again.glob("*.whl"):
        assert wheel.read_bytes() == (built / wheel.name).read_bytes()


def test_what_is_compiled_is_taken_whenever_it_was_unpacked(built: Path) -> None:
    content = own_file(built).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content[content.index(b"\x1f\x8b\x08") :])) as tar:
        modules = [member for member in tar if member.name.endswith(".pyc")]
        flags = {extracted.read(8)[4] for member in modules if (extracted := tar.extractfile(member))}
    assert len(modules) > 1000
    assert flags == {1}, "expected: compiled with a hash that is not looked at"


def test_it_says_its_version(built: Path, bare: Path) -> None:
    install(own_file(built), bare)
    assert run(bare, "/usr/local/bin/llmgw", "--version") == f"llmgw {built.name}\n"
    (unpacked,) = (bare / "usr/local/lib/llmgw").iterdir()
    assert unpacked.name.startswith(f"{built.name}-")
    assert not list((bare / "tmp").iterdir())


def test_python_is_whole_and_stands_alone(built: Path, bare: Path) -> None:
    install(own_file(built), bare)
    run(bare, "/usr/local/bin/llmgw", "--version")
    python = next((bare / "usr/local/lib/llmgw").glob("*/bin/python3.11"))
    place = f"/{python.relative_to(bare)}"
    modules = "ssl,sqlite3,bz2,lzma,ctypes,uuid,readline,curses,zlib,hashlib,xml.parsers.expat,uvloop,cryptography.x509"
    code = f"import sys,{modules}; print(sys.prefix, *sys.path)"
    prefix, *path = run(bare, place, "-I", "-c", code).split()
    assert prefix == str(Path(place).parents[1])
    assert all(entry.startswith(prefix) for entry in path)
    # An environment for an engine is made from it.
    run(
        bare,
        str(Path(place).with_name("uv")),
        "venv",
        "--quiet",
        "--offline",
        "--no-cache",
        "--python",
        place,
        "/root/e",
    )
    base = run(bare, "/root/e/bin/python", "-I", "-c", "import sys, ssl; print(sys.base_prefix, sys.prefix)").split()
    assert base == [prefix, "/root/e"]


class Cluster:
    """``llmgw up`` in a bare system; other commands run in the same one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)
            if line.startswith("  operate "):
                break
        self.rest = threading.Thread(target=self._drain)
        self.rest.start()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(self.process.stdout)

    def told(self, name: str) -> str:
        return next(line.split()[1] for line in self.said if line.startswith(f"  {name} "))

    def run(self, *words: str) -> str:
        (first,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        command = ["nsenter", "--target", first, "--all", "--root", "--wd", "/usr/bin/env", "-i", *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{''.join(self.said)}"
        return ended.stdout


def processes(tree: Path, command: str) -> list[int]:
    """The processes in that system whose command line has these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inside = os.readlink(entry / "root") == str(tree)
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if inside and command in words:
            found.append(int(entry.name))
    return found


def wait_for(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < ends_s, "not within its time"
        time.sleep(0.1)


@contextmanager
def cluster(tree: Path) -> Iterator[Cluster]:
    command = enter(tree, "HOME=/root", "/usr/local/bin/llmgw", "up", "--engine", "sim", "--dir", "/root/cluster")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield (up := Cluster(process))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        up.rest.join(60)
        assert process.stdout is not None
        process.stdout.close()


def test_a_cluster_answers_without_tmp_and_after_an_upgrade_of_the_file(built: Path, bare: Path) -> None:
    install(own_file(built), bare)
    shutil.rmtree(bare / "root/cluster", ignore_errors=True)
    with cluster(bare) as up:
        (folder,) = (bare / "usr/local/lib/llmgw").iterdir()
        python = f"/{folder.relative_to(bare)}/bin/python3.11"
        ask = (python, "-c", _ASK, up.told("endpoint"), up.told("key"), up.told("model"))
        assert up.run(*ask).strip()
        for entry in Path(f"/proc/{processes(bare, 'llmgw up')[0]}/root/tmp").iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        (bare / "usr/local/bin/llmgw").unlink()
        (bare / "usr/local/bin/llmgw").write_text("another build\n")
        assert up.run(*ask).strip()
        # What starts anew is still what it was, and finds the engine that runs.
        engines = processes(bare, "llmgw.simulator")
        (agent,) = processes(bare, "-m llmgw agent")
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: processes(bare, "-m llmgw agent") not in ([], [agent]))
        assert engines
        assert processes(bare, "llmgw.simulator") == engines
        assert up.run(*ask).strip()
