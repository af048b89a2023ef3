"""The head of a release, run by the shell of this machine, with a folder behind it that is small."""

import hashlib
import os
import platform
import subprocess
import tarfile
from pathlib import Path

import pytest
from deploy.release import archive

from llmgw.onboarding.release import build_to_install

OWN = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
OTHER = {"amd64": "arm64", "arm64": "amd64"}[OWN]
# What is started in place of Python says how.
PROGRAM = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo "$0"
echo "$@"
env
"""


def folder_of(tmp_path: Path, program: str = PROGRAM) -> Path:
    folder = tmp_path / "folder"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin/python3.11"
    python.write_text(program)
    python.chmod(0o755)
    (folder / "bin/python3").symlink_to("python3.11")
    (folder / "data").write_bytes(os.urandom(200_000))
    return folder


def release(tmp_path: Path, *, architecture: str = OWN, version: str = "v1.2.3", program: str = PROGRAM) -> Path:
    packed = archive.pack(
        folder_of(tmp_path, program), version=version, architecture=architecture, epoch_s=1_700_000_000
    )
    file = tmp_path / "llmgw"
    file.write_bytes(packed.content)
    file.chmod(0o755)
    return file


def command(tmp_path: Path, file: Path, *words: str) -> list[str]:
    """As a user who is not root, whatever the tests run as: its folder is in its home."""
    here = tmp_path / "home"
    here.mkdir(exist_ok=True)
    env = ["env", "-i", f"HOME={here}", "PYTHONPATH=/nowhere", "PYTHONHOME=/nowhere"]
    if os.geteuid() != 0:
        return [*env, str(file), *words]
    for place in (*tmp_path.parents, tmp_path):
        if place.owner() == "root" and str(place).startswith("/tmp/pytest"):
            place.chmod(0o755)
    os.chown(here, 65534, 65534)
    return [*env, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(file), *words]


def run(tmp_path: Path, file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tmp_path, file, *words), capture_output=True, text=True, check=False, cwd="/")


def cache(tmp_path: Path) -> Path:
    return tmp_path / "home/.cache/llmgw"


def test_it_unpacks_itself_once_and_only_goes_there_after_that(tmp_path: Path) -> None:
    file = release(tmp_path)
    first = run(tmp_path, file, "agent", "a b")
    assert first.returncode == 0, first.stderr
    folder, arguments, *environment = first.stdout.splitlines()
    (unpacked,) = cache(tmp_path).iterdir()
    assert folder == str(unpacked / "bin/python3.11")
    assert unpacked.name.startswith("v1.2.3-")
    assert arguments == "-s -P -m llmgw agent a b"
    assert f"LLMGW_FILE={file}" in environment
    assert not [line for line in environment if line.startswith(("PYTHON", "LD_"))]
    assert (unpacked / "bin/python3").readlink() == Path("python3.11")
    before = unpacked.stat()
    assert run(tmp_path, file).stdout.splitlines()[0] == folder
    assert unpacked.stat() == before


def test_what_it_ends_with_is_what_llmgw_ends_with(tmp_path: Path) -> None:
    file = release(tmp_path, program='#!/bin/sh\n[ "$1" = -c ] || exit 7\n')
    assert run(tmp_path, file).returncode == 7
    assert run(tmp_path, file).returncode == 7


def test_first_starts_that_race_leave_one_folder(tmp_path: Path) -> None:
    file = release(tmp_path)
    starts = [
        subprocess.Popen(command(tmp_path, file), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        for _ in range(8)
    ]
    said = [start.communicate(timeout=60) for start in starts]
    assert {start.returncode for start in starts} == {0}, said
    assert len({output.splitlines()[0] for output, _ in said}) == 1
    assert [path.name[:7] for path in cache(tmp_path).iterdir()] == ["v1.2.3-"]


@pytest.mark.parametrize("lost", [1, 100_000])
def test_a_file_that_is_not_whole_is_refused_and_leaves_nothing(tmp_path: Path, lost: int) -> None:
    file = release(tmp_path)
    file.write_bytes(file.read_bytes()[:-lost])
    ended = run(tmp_path, file)
    assert ended.returncode == 1
    assert "is damaged or not whole" in ended.stderr
    assert not cache(tmp_path).exists()


def test_another_machine_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, release(tmp_path, architecture=OTHER))
    assert ended.returncode == 1
    assert f"this file is for linux-{OTHER}, and this machine is Linux-{platform.machine()}" in ended.stderr
    assert not cache(tmp_path).exists()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = release(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.cache").write_text("a file, not a folder")
    ended = run(tmp_path, file)
    assert ended.returncode == 1
    assert f"it unpacks itself into {cache(tmp_path)} once, and that can't be made" in ended.stderr


def test_what_does_not_run_there_is_said(tmp_path: Path) -> None:
    ended = run(tmp_path, release(tmp_path, program="#!/bin/sh\nexit 126\n"))
    assert ended.returncode == 1
    assert "does not run" in ended.stderr


def test_a_later_build_lies_beside_the_earlier_one(tmp_path: Path) -> None:
    file = release(tmp_path)
    first = run(tmp_path, file).stdout.splitlines()[0]
    (tmp_path / "later").mkdir()
    os.replace(release(tmp_path / "later", version="v1.3.0"), file)
    second = run(tmp_path, file).stdout.splitlines()[0]
    assert first != second
    assert Path(first).exists()


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    first = archive.compress(folder, 1_700_000_000)
    for path in archive.walk(folder):
        if not path.is_symlink():
            os.utime(path, (1, 1))
            path.chmod(0o700 if path.stat().st_mode & 0o100 else 0o600)
    assert archive.compress(folder, 1_700_000_000) == first


def test_all_in_it_is_of_root_and_of_one_moment(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(archive.compress(folder_of(tmp_path), 1_700_000_000))
    with tarfile.open(tmp_path / "packed") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == ["bin", "bin/python3", "bin/python3.11", "data"]
    assert {(member.uid, member.gid, member.mtime) for member in members} == {(0, 0, 1_700_000_000)}


def test_the_name_of_its_folder_follows_from_what_is_in_it(tmp_path: Path) -> None:
    packed = archive.pack(folder_of(tmp_path), version="v1.2.3", architecture=OWN, epoch_s=1)
    payload = packed.content[packed.content.index(b"\x1f\x8b") :]
    assert packed.build == f"v1.2.3-{hashlib.sha256(payload).hexdigest()[:12]}"


def test_onboarding_knows_for_which_machines_a_build_is(tmp_path: Path) -> None:
    program = '#!/bin/sh\n[ "$1" = -c ] || echo "llmgw v1.2.3+4.abc1234"\n'
    file = release(tmp_path, version="v1.2.3+4.abc1234", program=program)
    copied = build_to_install(None, "v1.2.3+4.abc1234", file)
    assert copied.architecture == platform.machine()
    assert copied.file == file
