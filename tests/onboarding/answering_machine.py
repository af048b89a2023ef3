"""What a started machine does, as far as anybody sees it from outside: it reads its CD and answers by ssh."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.onboarding.proxmox import schema
from tests.onboarding.proxmox.host import Host
from tests.onboarding.proxmox.iso import read_iso

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")

_HOOK = """#!/bin/sh
# In the background: a machine takes its time, and nobody waits for it here. While it does, the lock is held.
exec 9>>{folder}/booting.lock
flock --shared 9
PYTHONPATH={root} {python} -m tests.onboarding.answering_machine {folder} "$1" >{folder}/hook.log 2>&1 </dev/null &
"""

needs_sshd = pytest.mark.skipif(SSHD is None, reason="there is no sshd on this machine (package openssh-server)")


class Machines:
    """Each machine that ``host`` starts has an sshd at ``port`` of this machine, with the key that its CD names."""

    def __init__(self, host: Host, port: int, python: str, root: Path) -> None:
        self.host = host
        (host.folder / "sshd.port").write_text(str(port))
        hook = host.folder / "hooks/start"
        hook.write_text(_HOOK.format(root=root, python=python, folder=host.folder))
        hook.chmod(0o755)

    def foreign(self) -> None:
        """What answers has another key than the CD says."""
        (self.host.folder / "foreign").touch()

    def silent(self, is_so: bool = True) -> None:
        mark = self.host.folder / "silent"
        mark.touch() if is_so else mark.unlink()

    async def booted(self, vmid: int) -> None:
        """Returns once a machine has read its CD."""
        async with asyncio.timeout(20):
            while not (self.host.folder / f"seed-{vmid}.read").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def seed(self, vmid: int) -> dict[str, bytes]:
        """The files that were on a machine's CD when it was started."""
        folder = self.host.folder / f"seed-{vmid}"
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def end(self) -> None:
        with (self.host.folder / "booting.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        for path in self.host.folder.glob("sshd-*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGTERM)


def boot(folder: Path, vmid: int) -> None:
    """Reads the machine's CD as its cloud-init would, and starts its sshd."""
    host = Host(folder)
    volume, properties = schema.drive(host.vms()[vmid]["scsi1"])
    assert properties["media"] == "cdrom"
    label, files = read_iso(host.path(volume).read_bytes())
    assert label == "cidata"
    seed = folder / f"seed-{vmid}"
    seed.mkdir(exist_ok=True)
    for name, data in files.items():
        (seed / name).write_bytes(data)
    (folder / f"seed-{vmid}.read").touch()
    if not (folder / "silent").exists():
        serve(folder, vmid)


def serve(folder: Path, vmid: int) -> None:
    assert SSHD is not None
    keys = yaml.safe_load((folder / f"seed-{vmid}/user-data").read_text())["ssh_keys"]
    key = folder / f"host-key-{vmid}"
    key.unlink(missing_ok=True)
    if (folder / "foreign").exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    else:
        key.write_text(keys["ed25519_private"])
        key.chmod(0o600)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    port = (folder / "sshd.port").read_text()
    settings = {"ListenAddress": "127.0.0.1", "Port": port, "HostKey": str(key), "PidFile": "none", "UsePAM": "no"}
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    command = shlex.join([SSHD, "-D", "-f", "/dev/null", "-E", str(folder / "sshd.log"), *options])
    script = f"{command} </dev/null >/dev/null 2>&1 & echo $! >{folder}/sshd-{vmid}.pid"
    subprocess.run(["sh", "-c", script], check=True)


if __name__ == "__main__":
    import sys

    boot(Path(sys.argv[1]), int(sys.argv[2]))
