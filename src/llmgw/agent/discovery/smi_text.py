"""What nvidia-smi prints: CSV queries, ``-L``, and its errors, which come on stdout. Pure."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence

from llmgw.agent.discovery.gpus import Device, Instance, normal_bus_id

CORE_FIELDS = ("index", "uuid", "name", "memory.total")
"""Known to every driver."""
FIELDS = (*CORE_FIELDS, "driver_version", "pci.bus_id", "mig.mode.current")
MEMORY_FIELDS = ("uuid", "memory.used", "memory.total")
HOLDER_FIELDS = ("gpu_uuid", "pid", "process_name")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UUID = re.compile(r"GPU-[0-9A-Za-z-]{4,64}")
_MIB = re.compile(r"([0-9]{1,9})(?:\s*MiB)?")
_PLACEHOLDER = re.compile(r"\[(.*)\]|N/A")
# "Does not apply here", as opposed to "went wrong".
_BENIGN = frozenset(
    {"n/a", "not supported", "not found", "insufficient permissions", "requested functionality has been deprecated"}
)
_UNSUPPORTED = frozenset({"n/a", "not supported"})
_LIST_GPU = re.compile(r"GPU ([0-9]{1,4}):.*\(UUID: *(\S+?)\)")
_LIST_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+([0-9]{1,4}):\s*\(UUID: *(MIG-\S+?)\)")
_LOST = re.compile(
    r"Unable to determine the device handle for GPU\s*([0-9A-Fa-f]+(?::[0-9A-Fa-f]+){1,2}\.[0-9]):\s*(.+)"
)

NO_DEVICE = (
    "the driver is loaded but has no device here: in a container, start that with the GPUs (`--gpus all`, by the "
    "nvidia-container-toolkit); else see dmesg for NVRM lines"
)
_SMI_ERRORS: Mapping[int, str] = {
    4: "run the agent as root, or give its user access to /dev/nvidia*",
    6: NO_DEVICE,
    8: "plug the GPU's power cables in",
    9: "the NVIDIA driver is not loaded: modprobe nvidia, or install (after a kernel upgrade: rebuild) it",
    12: "libnvidia-ml.so is missing: install the driver's user libraries",
    14: "the GPU's infoROM is corrupted: the card may need service",
    15: "a GPU is lost: reboot to recover it; if that does not help, reseat or replace it",
    18: "the driver's libraries were upgraded under the loaded kernel module: reboot, or reload the nvidia modules",
}
_NO_NODES = re.compile(r"initialize NVML: Unknown Error", re.IGNORECASE)
# By its words: the status is 255, under which a mismatch comes too.
_NODES_LOST = (
    "the driver is loaded, but its devices (/dev/nvidia*) can't be opened: a container loses them when systemd is "
    "reloaded on its host (`systemctl daemon-reload`): restart the container, with `--gpus all` and the "
    "nvidia-container-toolkit; outside of one, see dmesg for NVRM lines"
)
_SAME_AS_9 = re.compile("couldn't communicate with the NVIDIA driver")
_SAME_AS_18 = re.compile("version mismatch", re.IGNORECASE)


def parse_devices(text: str, fields: Sequence[str] = FIELDS) -> tuple[Device, ...]:
    """The GPUs in a CSV query's output; lines that describe none (warnings, errors, a header) are passed over.

    A header decides the columns where there is one. A GPU is kept whichever of its cells are no values.
    """
    devices: dict[int, Device] = {}
    for cells in _rows(text):
        if cells[0] == "index" or "uuid" in cells:
            fields = [cell.partition(" [")[0] for cell in cells]
        elif (device := _device(cells, fields)) is not None:
            devices.setdefault(device.index, device)
    return tuple(devices.values())


def parse_driver(text: str, fields: Sequence[str] = FIELDS) -> str | None:
    for cells in _rows(text):
        version = _by_field(cells, fields).get("driver_version", "")
        if re.fullmatch(r"[0-9]+(?:\.[0-9]+)+", version):
            return version
    return None


def parse_instances(text: str) -> Mapping[str, tuple[Instance, ...]]:
    """``nvidia-smi -L``: MIG instances by their GPU's UUID. Their memory is not said there."""
    found: dict[str, tuple[Instance, ...]] = {}
    gpu: str | None = None
    for line in _ANSI.sub("", text).splitlines():
        if match := _LIST_GPU.match(line):
            gpu = match[2]
        elif gpu is not None and (match := _LIST_MIG.match(line)):
            instance = Instance(device=int(match[2]), uuid=match[3], profile=match[1])
            found[gpu] = (*found.get(gpu, ()), instance)
    return found


def parse_lost(text: str) -> Mapping[str, str]:
    """GPUs that have no device handle any more: PCI bus id, as /sys writes it, to the driver's words."""
    # The message is wrapped: each reaches up to the next one.
    messages = (f"Unable to{rest}" for rest in " ".join(_ANSI.sub("", text).split()).split("Unable to")[1:])
    found = ((normal_bus_id(match[1]), match[2].strip(" .")) for one in messages if (match := _LOST.match(one)))
    return {bus_id: words for bus_id, words in found if bus_id is not None}


def explain_failure(status: int, text: str) -> str:
    """What a failed nvidia-smi said, and what to do, in one line. ``status`` < 0: a signal ended it."""
    clean = _ANSI.sub("", text)
    said = next((" ".join(line.split()) for line in clean.splitlines() if line.strip()), "")[:300]
    if _SAME_AS_18.search(clean):
        status = 18
    elif _SAME_AS_9.search(clean):
        status = 9
    how = f"signal {-status}" if status < 0 else f"status {status}"
    advice = _SMI_ERRORS.get(status, "run it by hand on this machine to see more")
    if _NO_NODES.search(clean):
        advice = _NODES_LOST
    return f"nvidia-smi ended with {how}" + (f' ("{said.rstrip(".")}")' if said else "") + f": {advice}"


def parse_memory(text: str) -> Mapping[str, tuple[int, int]]:
    """By UUID: (bytes in use, bytes in all), of rows of ``MEMORY_FIELDS``. GPUs of which the driver does not say both
    are left out, as is whatever a stand-in prints instead of what it was asked for."""
    found = {}
    for cells in _rows(text):
        if len(cells) != len(MEMORY_FIELDS) or not _UUID.fullmatch(cells[0]):
            continue
        used, total = _MIB.fullmatch(cells[1]), _MIB.fullmatch(cells[2])
        if used and total and int(total[1]) > 0:
            found[cells[0]] = (int(used[1]) << 20, int(total[1]) << 20)
    return found


def parse_holders(text: str) -> Mapping[str, tuple[str, ...]]:
    """By UUID: who computes on the GPU, as "pid 4242 (python)", of rows of ``HOLDER_FIELDS``. The driver names nobody
    who is in another container."""
    found: dict[str, tuple[str, ...]] = {}
    for cells in _rows(text):
        # A program's name is not quoted, and may hold commas.
        if len(cells) >= len(HOLDER_FIELDS) and _UUID.fullmatch(cells[0]) and cells[1].isdecimal():
            program = ", ".join(cells[2:])
            name = "" if _placeholder(program) is not None else f" ({program.rpartition('/')[2]})"
            found[cells[0]] = (*found.get(cells[0], ()), f"pid {cells[1]}{name}")
    return found


def explain_status(status: int) -> str | None:
    """What to do about a status under which data was printed all the same; None: nothing."""
    return _SMI_ERRORS.get(status)


def _rows(text: str) -> Iterable[list[str]]:
    lines = _ANSI.sub("", text).replace("\r", "\n").replace("\0", "").splitlines()
    try:
        yield from ([cell.strip() for cell in row] for row in csv.reader(lines, skipinitialspace=True) if row)
    except csv.Error:  # a cell longer than the csv module takes: nothing after it is a GPU
        return


def _by_field(cells: Sequence[str], fields: Sequence[str]) -> Mapping[str, str]:
    """Cells by field; {} for a row of a length that was not asked for.

    The core fields alone are accepted too: wrappers and stand-ins often print just these.
    """
    if len(cells) == len(fields):
        return dict(zip(fields, cells, strict=True))
    if len(cells) == len(CORE_FIELDS) and tuple(fields[: len(CORE_FIELDS)]) == CORE_FIELDS:
        return dict(zip(CORE_FIELDS, cells, strict=True))
    return {}


def _device(cells: Sequence[str], fields: Sequence[str]) -> Device | None:
    row = _by_field(cells, fields)
    index, uuid = row.get("index", ""), row.get("uuid", "")
    if not re.fullmatch(r"[0-9]{1,4}", index):
        return None
    if not _UUID.fullmatch(uuid):
        # A GPU that fell off the bus may have lost its name too; anything else is not a GPU.
        if not _PLACEHOLDER.fullmatch(uuid):
            return None
        uuid = f"unknown-{index}"
    memory, unsupported = _memory(row.get("memory.total", ""))
    name = row.get("name", "")
    return Device(
        index=int(index),
        uuid=uuid,
        name="unknown" if not name or _placeholder(name) is not None else name,
        memory_bytes=memory,
        unsupported_memory=unsupported,
        bus_id=normal_bus_id(row.get("pci.bus_id", "")),
        mig=row.get("mig.mode.current") == "Enabled",
        problem=_problem(row, uuid),
    )


def _memory(cell: str) -> tuple[int | None, bool]:
    """(bytes or None, whether the driver says that the device has no memory of its own)."""
    match = _MIB.fullmatch(cell)
    if match is not None and int(match[1]) > 0:
        return int(match[1]) << 20, False
    return None, _placeholder(cell) in _UNSUPPORTED


def _problem(row: Mapping[str, str], uuid: str) -> str | None:
    for cell in row.values():
        words = _placeholder(cell)
        if words is not None and words not in _BENIGN:
            return cell.strip("[]")
    return "the driver does not know its UUID" if uuid.startswith("unknown-") else None


def _placeholder(cell: str) -> str | None:
    match = _PLACEHOLDER.fullmatch(cell)
    return None if match is None else (match[1] or cell).strip("[]").lower()
