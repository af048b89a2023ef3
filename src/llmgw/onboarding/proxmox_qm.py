"""Proxmox by its own programs, on the host itself: ``qm`` does, ``pvesh`` reads, ``pvesm`` knows where volumes lie."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmgw.onboarding.image import Image, fetch_image
from llmgw.onboarding.pci import SYSFS, PciDevice, read_pci_devices
from llmgw.onboarding.proxmox import Patience, Proxmox, ProxmoxError, Say, kind_of
from llmgw.pki.files import replace

IMAGES = Path("/var/cache/llmgw/images")
_MOST_WORDS = 600
_SEED_MODE = 0o600


class Qm(Proxmox):
    """The Proxmox of this host; ``images`` is where downloaded images are kept, ``sysfs`` where devices are read."""

    def __init__(self, *, images: Path = IMAGES, sysfs: Path = SYSFS, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.node = "localhost"
        self._images = images
        self._sysfs = sysfs

    async def __aenter__(self) -> Qm:
        missing = [program for program in ("qm", "pvesh", "pvesm") if shutil.which(program, path=_path()) is None]
        if missing:
            raise ProxmoxError(
                f"there is no {missing[0]} on this machine: run it on the Proxmox host, or name its REST API with "
                "--api https://HOST:8006 --api-token USER@REALM!ID=SECRET"
            )
        return self

    async def read(self, path: str, **parameters: str) -> Any:
        options = [word for name, value in parameters.items() for word in (f"--{name.replace('_', '-')}", value)]
        answer = await _run("pvesh", "get", path, *options, "--output-format", "json")
        try:
            return json.loads(answer)
        except ValueError:
            raise ProxmoxError(f"`pvesh get {path}` did not answer in JSON: {answer[:100]!r}") from None

    async def pci_devices(self) -> Sequence[PciDevice]:
        return await asyncio.to_thread(read_pci_devices, self._sysfs)

    async def pass_through(self, devices: Sequence[str]) -> Mapping[str, str]:
        return {f"hostpci{number}": f"{device},pcie=1" for number, device in enumerate(devices)}

    async def bring(self, image: Image, say: Say) -> str:
        return str(await fetch_image(image, self._images, say))

    async def put_seed(self, name: str, data: bytes) -> str:
        volume = f"{await self.iso_storage()}:iso/{name}"
        path = Path((await _run("pvesm", "path", volume)).strip())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # It holds the machine's host key: nobody but the hypervisor reads it.
            await asyncio.to_thread(replace, path, data, _SEED_MODE)
        except OSError as error:
            raise ProxmoxError(f"{path} can't be written: {error.strerror or error}", look="pvesm status") from None
        return volume

    async def drop_seed(self, volume: str) -> None:
        path = Path((await _run("pvesm", "path", volume)).strip())
        if path.exists():
            await _run("pvesm", "free", volume)

    async def create(self, vmid: int, options: Mapping[str, str], keys: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile("w", prefix="llmgw-keys-", encoding="utf-8") as file:
            file.write("".join(f"{key}\n" for key in keys))
            file.flush()
            # Here it is the name of a file; in the API it is the text.
            await _run("qm", "create", str(vmid), *_options({**options, "sshkeys": file.name}))

    async def change(self, vmid: int, options: Mapping[str, str]) -> None:
        await _run("qm", "set", str(vmid), *_options(options))

    async def resize(self, vmid: int, disk: str, size: str) -> None:
        await _run("qm", "resize", str(vmid), disk, size)

    async def start(self, vmid: int) -> None:
        await _run("qm", "start", str(vmid))

    async def stop(self, vmid: int) -> None:
        await _run("qm", "stop", str(vmid))

    async def unlock(self, vmid: int) -> None:
        await _run("qm", "unlock", str(vmid))

    async def destroy(self, vmid: int) -> None:
        await _run("qm", "destroy", str(vmid), "--purge", "1")

    def command(self, *words: str) -> str:
        return shlex.join(("qm", *words))


def _options(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


async def _run(*command: str) -> str:
    """What the command prints. Once begun it is not interrupted: half a change is worse than a late one."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C", "PATH": _path()},
        start_new_session=True,
    )
    ending = asyncio.ensure_future(process.communicate())
    try:
        out, complaints = await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise
    if process.returncode == 0:
        return out.decode("utf-8", "replace")
    raise _failed(
        command, process.returncode or 0, complaints.decode("utf-8", "replace") or out.decode("utf-8", "replace")
    )


def _failed(command: Sequence[str], status: int, said: str) -> ProxmoxError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # What follows an error of syntax is the whole usage.
    told = [line for line in lines if not line.startswith(f"{command[0]} {command[1]} ")]
    words = "; ".join(told)[-_MOST_WORDS:] or f"exit status {status} and no words"
    return ProxmoxError(f"`{command[0]} {command[1]}`: {words}", kind_of(said))


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
