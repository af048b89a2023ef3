"""One node of Proxmox that keeps its state in a folder: what `qm` and the REST API here are two faces of.

It boots nothing by itself: a program ``hooks/start`` in the folder is run with a machine's number once it is started.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.onboarding.proxmox import schema

NODE = "pve1"
LOCK_S = 0.3
GIB = 1 << 30
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
SETTINGS: dict[str, Any] = {
    "cpus": 16,
    "bridges": ["vmbr0"],
    "dns": {"dns1": "10.0.0.2", "search": "lab"},
    "storages": {
        "local": {"type": "dir", "content": "iso,vztmpl,backup,import"},
        "local-lvm": {"type": "lvmthin", "content": "images,rootdir"},
    },
    "guests": [{"vmid": 101, "name": "db", "node": "pve2", "type": "lxc"}],
    "pci": [],
    "mappings": [],
    "tokens": {},
}


class PveError(Exception):
    def __init__(self, words: str, status: int = 500) -> None:
        super().__init__(words)
        self.status = status


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def install(cls, folder: Path, **settings: Any) -> Host:
        host = cls(folder)
        for name in ("vms", "disks", "locks", "hooks", "vz/template/iso", "vz/import"):
            (folder / name).mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps({**SETTINGS, **settings}))
        (folder / "faults.json").write_text("[]")
        return host

    # -- for tests

    @property
    def settings(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "settings.json").read_text())
        return loaded

    def will_fail(self, at: str, how: str, times: int = 1) -> None:
        """``at``: create, set, disk, resize, start, stop, destroy, iso, image; ``how``: see _fault."""
        with self._state():
            faults = json.loads((self.folder / "faults.json").read_text())
            (self.folder / "faults.json").write_text(json.dumps([*faults, {"at": at, "how": how, "times": times}]))

    def log(self) -> list[list[str]]:
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def note(self, *words: str) -> None:
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\n")

    def vms(self) -> dict[int, dict[str, str]]:
        return {int(path.stem): json.loads(path.read_text()) for path in sorted((self.folder / "vms").glob("*.json"))}

    def write_vm(self, vmid: int, config: dict[str, str]) -> None:
        path = self.folder / f"vms/{vmid}.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(config))
        draft.rename(path)

    def disks(self) -> dict[str, int]:
        return {path.name: int(path.read_text()) for path in (self.folder / "disks").iterdir()}

    def isos(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "vz/template/iso").iterdir() if path.name[0] != ".")

    def lock_of(self, vmid: int) -> Path:
        return self.folder / f"locks/lock-{vmid}.conf"

    # -- reading

    def read(self, path: str, parameters: dict[str, str], node: str) -> Any:
        parts = path.strip("/").split("/")
        if parts == ["nodes"]:
            return [{"node": NODE, "status": "online", "type": "node"}]
        if parts == ["cluster", "resources"]:
            return self._resources()
        if parts == ["cluster", "status"]:
            return [{"type": "cluster", "name": "lab"}, {"type": "node", "name": NODE, "local": 1}]
        if parts == ["cluster", "mapping", "pci"]:
            return self.settings["mappings"]
        if len(parts) < 3 or parts[0] != "nodes":
            raise PveError(f"No '{path}' handler defined", 501)
        if parts[1] not in (NODE, node):
            raise PveError(f"hostname lookup '{parts[1]}' failed - failed to get address info for: {parts[1]}")
        return self._read_node(parts[2:], parameters, path)

    def _read_node(self, parts: list[str], parameters: dict[str, str], path: str) -> Any:
        settings = self.settings
        match parts:
            case ["dns"]:
                return settings["dns"]
            case ["network"]:
                return [{"iface": name, "type": "bridge"} for name in settings["bridges"]]
            case ["hardware", "pci"]:
                return settings["pci"]
            case ["storage"]:
                return self._storages(parameters)
            case ["storage", name, "content"]:
                return self._content(name, parameters.get("content", ""))
            case ["qemu", number, "config"]:
                return {**self._vm(int(number)), "digest": "0" * 40}
            case ["qemu", number, "status", "current"]:
                self._vm(int(number))
                return {"vmid": int(number), "status": "running" if self.is_running(int(number)) else "stopped"}
        raise PveError(f"No '{path}' handler defined", 501)

    def _resources(self) -> list[dict[str, Any]]:
        own = [
            {"vmid": vmid, "name": config.get("name", f"VM {vmid}"), "node": NODE, "type": "qemu"}
            for vmid, config in self.vms().items()
        ]
        return [*own, *self.settings["guests"]]

    def _storages(self, parameters: dict[str, str]) -> list[dict[str, Any]]:
        wanted = parameters.get("content")
        rows = [
            {"storage": name, "active": 1, "enabled": 1, "avail": 500 * GIB, "used": 1, "total": 900 * GIB, **facts}
            for name, facts in self.settings["storages"].items()
        ]
        return [row for row in rows if wanted is None or wanted in row["content"].split(",")]

    def _content(self, storage: str, content: str) -> list[dict[str, Any]]:
        folder = {"iso": "vz/template/iso", "import": "vz/import"}[content]
        return [
            {"volid": f"{storage}:{content}/{path.name}", "content": content, "size": path.stat().st_size}
            for path in sorted((self.folder / folder).iterdir())
        ]

    def path(self, volume: str) -> Path:
        storage, _, name = volume.partition(":")
        if storage not in self.settings["storages"]:
            raise PveError(f"storage '{storage}' does not exist")
        kind, _, file = name.partition("/")
        if kind not in ("iso", "import") or not file or "/" in file:
            raise PveError(f"unable to parse directory volume name '{name}'")
        return self.folder / {"iso": "vz/template/iso", "import": "vz/import"}[kind] / file

    # -- doing

    def create(self, vmid: int, options: dict[str, str], *, api: bool) -> None:
        self._check(options, api=api)
        if not 100 <= vmid <= 999_999_999:
            raise PveError(f"vmid: value must have a minimum value of 100 (got {vmid})", 400)
        how = self._fault("create", vmid)
        if how == "race":
            self.write_vm(vmid, {"name": "somebody-elses", "memory": "512"})
        with self._state():
            taken = [row["node"] for row in self._resources() if row["vmid"] == vmid]
            if taken:
                raise PveError(f"unable to create VM {vmid} - VM {vmid} already exists on node '{taken[0]}'")
            if how == "half":
                self.write_vm(vmid, {**_ordered(options), "lock": "create"})
                raise PveError(f"unable to create VM {vmid} - cfs-lock 'storage-x' error: got lock request timeout")
            self.write_vm(vmid, {})
        try:
            self._apply(vmid, {}, options)
        except BaseException:
            (self.folder / f"vms/{vmid}.json").unlink()
            raise

    def set(self, vmid: int, options: dict[str, str], *, api: bool) -> None:
        self._check(options, api=api)
        config = self._unlocked(vmid)
        with self._locked(vmid):
            self._fault("set" if "scsi0" not in options else "disk", vmid)
            self._apply(vmid, config, options)

    def resize(self, vmid: int, disk: str, size: str) -> None:
        config = self._unlocked(vmid)
        wanted = re.fullmatch(r"(\+?)(\d+)([KMGT]?)", size)
        if wanted is None:
            raise PveError(f"size: value does not match the regex pattern ({size})", 400)
        with self._locked(vmid):
            self._fault("resize", vmid)
            if disk not in config:
                raise PveError(f"disk '{disk}' does not exist")
            name = schema.drive(config[disk])[0].partition(":")[2]
            before = self.disks()[name]
            after = int(wanted[2]) * UNITS[wanted[3]] + (before if wanted[1] else 0)
            if after < before:
                raise PveError("shrinking disks is not supported")
            (self.folder / "disks" / name).write_text(str(after))

    def start(self, vmid: int) -> None:
        config = self._unlocked(vmid)
        with self._locked(vmid):
            self._fault("start", vmid)
            if self.is_running(vmid):
                raise PveError(f"VM {vmid} already running")
            cores, cpus = int(config.get("cores", "1")), self.settings["cpus"]
            if cores > cpus:
                raise PveError(f"MAX {cpus} vcpus allowed per VM on this node")
            self._check_attached(config)
            (self.folder / f"vms/{vmid}.running").touch()
        hook = self.folder / "hooks/start"
        if hook.exists():
            subprocess.run([str(hook), str(vmid)], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def stop(self, vmid: int) -> None:
        self._unlocked(vmid)
        with self._locked(vmid):
            self._fault("stop", vmid)
            (self.folder / f"vms/{vmid}.running").unlink(missing_ok=True)

    def unlock(self, vmid: int) -> None:
        config = self._vm(vmid)
        config.pop("lock", None)
        self.write_vm(vmid, config)

    def destroy(self, vmid: int) -> None:
        self._unlocked(vmid)
        with self._locked(vmid):
            self._fault("destroy", vmid)
            if self.is_running(vmid):
                raise PveError(f"VM {vmid} is running - destroy failed")
            (self.folder / f"vms/{vmid}.json").unlink()
            for name in self.disks():
                if name.startswith(f"vm-{vmid}-"):
                    (self.folder / "disks" / name).unlink()

    def free(self, volume: str) -> None:
        path = self.path(volume)
        if not path.exists():
            raise PveError(f"volume '{volume}' does not exist")
        path.unlink()

    def is_running(self, vmid: int) -> bool:
        return (self.folder / f"vms/{vmid}.running").exists()

    # -- inside

    def _check_attached(self, config: dict[str, str]) -> None:
        for name, value in config.items():
            bridge = dict(part.partition("=")[::2] for part in value.split(",")).get("bridge")
            if name.startswith("net") and bridge not in self.settings["bridges"]:
                raise PveError(f"bridge '{bridge}' does not exist")
            if re.fullmatch(r"(scsi|ide)\d+", name) and "media=cdrom" in value:
                volume = schema.drive(value)[0]
                if volume != "none" and not self.path(volume).is_file():
                    raise PveError(f"volume '{volume}' does not exist")

    def _check(self, options: dict[str, str], *, api: bool) -> None:
        try:
            schema.check(options, api=api)
        except schema.BadParameter as error:
            raise PveError(f"Parameter verification failed.\n{error}", 400) from None

    def _apply(self, vmid: int, config: dict[str, str], options: dict[str, str]) -> None:
        config = dict(config)
        for name, value in _ordered(options).items():
            if re.fullmatch(r"(scsi|ide|sata|virtio)\d+|efidisk0", name):
                value = self._attach(vmid, value)
            config[name] = value
        self.write_vm(vmid, config)

    def _attach(self, vmid: int, value: str) -> str:
        volume, properties = schema.drive(value)
        if volume == "none" or properties.get("media") == "cdrom":
            if volume != "none" and not self.path(volume).is_file():
                raise PveError(f"volume '{volume}' does not exist")
            return value
        storage, _, size = volume.partition(":")
        facts = self.settings["storages"].get(storage)
        if facts is None:
            raise PveError(f"storage '{storage}' does not exist")
        if "images" not in facts["content"].split(","):
            raise PveError(f"storage '{storage}' does not support content-type 'images'")
        if not size.isdigit():
            return value
        source = properties.pop("import-from", None)
        size_bytes = int(size) * GIB if source is None else self._virtual_size(source)
        name = f"vm-{vmid}-disk-{sum(1 for disk in self.disks() if disk.startswith(f'vm-{vmid}-'))}"
        (self.folder / "disks" / name).write_text(str(size_bytes))
        rest = [f"{key}={given}" for key, given in properties.items()]
        return ",".join([f"{storage}:{name}", *rest, f"size={size_bytes >> 20}M"])

    def _virtual_size(self, source: str) -> int:
        path = Path(source) if source.startswith("/") else self.path(source)
        if not path.is_file():
            raise PveError(f"cannot import from '{source}' - no such file")
        with path.open("rb") as file:
            head = file.read(32)
        if head[:4] == b"QFI\xfb":
            return int(struct.unpack_from(">Q", head, 24)[0])
        return path.stat().st_size

    def _vm(self, vmid: int) -> dict[str, str]:
        path = self.folder / f"vms/{vmid}.json"
        if not path.exists():
            raise PveError(f"Configuration file 'nodes/{NODE}/qemu-server/{vmid}.conf' does not exist")
        config: dict[str, str] = json.loads(path.read_text())
        return config

    def _unlocked(self, vmid: int) -> dict[str, str]:
        config = self._vm(vmid)
        if "lock" in config:
            raise PveError(f"VM is locked ({config['lock']})")
        return config

    def _fault(self, at: str, vmid: int) -> str:
        """What is to go wrong now: raised here, or returned where the caller does it."""
        with self._state():
            path = self.folder / "faults.json"
            faults = json.loads(path.read_text())
            fault = next((each for each in faults if each["at"] == at and each["times"] > 0), None)
            if fault is None:
                return ""
            fault["times"] -= 1
            path.write_text(json.dumps(faults))
        how = str(fault["how"])
        if how == "lock":
            raise PveError(f"can't lock file '/var/lock/qemu-server/lock-{vmid}.conf' - got timeout")
        if how == "storage-lock":
            raise PveError("cfs-lock 'storage-local-lvm' error: got lock request timeout")
        if how.startswith("words:"):
            raise PveError(how.removeprefix("words:"))
        return how

    @contextmanager
    def _state(self) -> Iterator[None]:
        with (self.folder / "state.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _locked(self, vmid: int) -> Iterator[None]:
        with self.lock_of(vmid).open("a") as file:
            end = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        words = f"can't lock file '/var/lock/qemu-server/lock-{vmid}.conf' - got timeout"
                        raise PveError(words) from None
                    time.sleep(0.02)
            yield


def _ordered(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in ("vmid", "node")}


def qcow2(virtual_bytes: int) -> bytes:
    """The head of an image of that size: as much of it as anything here reads."""
    return b"QFI\xfb" + struct.pack(">IQIIQ", 3, 0, 0, 16, virtual_bytes) + bytes(480)


def install_programs(host: Host, folder: Path, python: str, root: Path) -> None:
    """`qm`, `pvesh` and `pvesm` for this host, to be found first on PATH."""
    folder.mkdir(exist_ok=True)
    for program in ("qm", "pvesh", "pvesm"):
        path = folder / program
        path.write_text(
            f"#!/bin/sh\nunset PYTHONDONTWRITEBYTECODE\nPYTHONPATH={root} PVE_STATE={host.folder} "
            f'exec {python} -S -m tests.onboarding.proxmox.programs {program} "$@"\n'
        )
        path.chmod(0o755)


def sh(*command: str) -> str:
    found = shutil.which(command[0])
    assert found is not None
    return subprocess.run([found, *command[1:]], check=True, capture_output=True, text=True).stdout
