import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from deploy.release import debian, wheels
from deploy.release.sbom import sbom

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_the_lock_names_each_package_of_debian(architecture: str) -> None:
    found = debian.read_lock(architecture)
    assert sorted(package.name for package in found) == sorted(debian.NAMES)
    assert all(re.fullmatch(r"[0-9a-f]{64}", package.sha256) for package in found)


def test_a_package_is_held_to_the_lock(tmp_path: Path) -> None:
    package = debian.Package("a", "1", "amd64", wheel(tmp_path, {"a/x.py": "1"}).sha256)
    (tmp_path / "a-1-py3-none-any.whl").rename(tmp_path / "a_amd64.deb")
    assert debian.fetch([package], tmp_path) == [tmp_path / "a_amd64.deb"]


def test_wheels_of_a_newer_libc_are_not_taken() -> None:
    tags = wheels.platforms("amd64")
    assert "manylinux_2_35_x86_64" in tags
    assert "manylinux_2_36_x86_64" not in tags
    assert {"manylinux2014_aarch64", "manylinux_2_17_aarch64"} <= set(wheels.platforms("arm64"))


def wheel(tmp_path: Path, members: dict[str, str]) -> wheels.Wheel:
    file = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        for name, text in members.items():
            packed.writestr(name, text)
    return wheels.wheel_of(file)


def test_a_wheel_is_put_where_it_belongs(tmp_path: Path) -> None:
    members = {"a/x.py": "1", "a-1.data/purelib/b.py": "2", "a-1.data/scripts/uv": "3", "a-1.data/scripts/other": "4"}
    wheels.install(wheel(tmp_path, members), tmp_path / "packages", tmp_path / "bin")
    put = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert put == {"a-1-py3-none-any.whl", "packages/a/x.py", "packages/b.py", "bin/uv"}
    assert (tmp_path / "bin/uv").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "packages/b.py").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_a_wheel_that_reaches_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(wheels.WheelsRefused, match="would lie outside of its folder"):
        wheels.install(wheel(tmp_path, {name: "1"}), tmp_path / "packages", tmp_path / "bin")
    assert not (tmp_path / "x").exists()


def test_the_sbom_names_all_with_their_hashes(tmp_path: Path) -> None:
    one = wheel(tmp_path, {"a/x.py": "1"})
    locked = debian.read_lock("amd64")
    text = sbom(version="v1.2.3", architecture="amd64", sha256="0" * 64, epoch_s=0, wheels=[one], debs=locked)
    document = json.loads(text)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    found = {row["purl"]: row["hashes"] for row in document["components"]}
    assert found["pkg:pypi/a@1"] == [{"alg": "SHA-256", "content": one.sha256}]
    assert len(found) == len(locked) + 1
    assert set(document["dependencies"][0]["dependsOn"]) == set(found)


# What only Linux has, taken away from Python before llmgw is imported.
_MACOS = """
import os, select, signal, socket, sys, sysconfig, urllib.request
sysconfig.get_config_vars()
for module, names in {
    os: "pidfd_open sched_getaffinity sched_setaffinity memfd_create setns unshare eventfd O_TMPFILE O_PATH",
    select: "epoll EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT pidfd_send_signal",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK SO_PEERCRED SO_BINDTODEVICE TCP_USER_TIMEOUT TCP_QUICKACK SOCK_CLOEXEC",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
from llmgw.cli import main
sys.argv = ["llmgw", "ctl", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", [["--help"], ["nodes", "--help"], ["cert", "list", "--help"]])
def test_ctl_needs_nothing_that_only_linux_has(command: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-c", _MACOS, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Usage: llmgw ctl" in ended.stdout


def test_the_program_says_its_version() -> None:
    ended = subprocess.run([sys.executable, "-m", "llmgw", "--version"], capture_output=True, text=True, check=False)
    assert re.fullmatch(r"llmgw v\d+\.\d+\.\d+(\+(\d+\.[0-9a-f]+|unknown))?\n", ended.stdout), ended.stdout
