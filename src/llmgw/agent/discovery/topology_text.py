"""What ``nvidia-smi topo -m`` prints: which GPUs NVLink joins, and the NUMA node that each is close to. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Cells stand between tabs; copies of it, and some wrappers, have blanks instead.
_BETWEEN = re.compile(r"\t+|\s{2,}")
_GPU = re.compile(r"GPU([0-9]{1,4})")
_BEHIND = re.compile(r"(?:CPU|NUMA|GPU NUMA)\b.*")
_NVLINK = re.compile(r"NV[0-9]{1,2}")
_NUMA = "NUMA Affinity"


@dataclass(frozen=True, slots=True)
class GpuLinks:
    nvlink_peers: tuple[int, ...] = ()
    numa_node: int | None = None


def parse_topology(text: str) -> Mapping[int, GpuLinks]:
    """By index of the GPU; {} where there is no matrix. Rows and cells that make no sense are passed over."""
    found: dict[int, GpuLinks] = {}
    columns: Sequence[str] = ()
    for line in _ANSI.sub("", text).replace("\r", "").splitlines():
        cells = [cell.strip() for cell in _BETWEEN.split(line.strip())]
        row = _GPU.fullmatch(cells[0])
        if row is None:
            continue
        if "X" not in cells:  # a device's row always has one, where it meets itself
            columns = columns or cells
        elif columns:
            found[int(row[1])] = _links(int(row[1]), cells[1:], columns)
    return found


def _links(own: int, cells: Sequence[str], columns: Sequence[str]) -> GpuLinks:
    devices = list(takewhile(lambda column: not _BEHIND.fullmatch(column), columns))
    peers = [
        int(match[1])
        for column, cell in zip(devices, cells, strict=False)
        if (match := _GPU.fullmatch(column)) and int(match[1]) != own and _NVLINK.fullmatch(cell)
    ]
    # Which of the columns behind the matrix an empty cell stood in can't be told: then none of them is believed.
    titles, values = columns[len(devices) :], cells[len(devices) :]
    behind = dict(zip(titles, values, strict=True)) if len(titles) == len(values) else {}
    return GpuLinks(tuple(peers), _number(behind.get(_NUMA, "")))


def _number(cell: str) -> int | None:
    """One NUMA node; of a range such as "0-1" none."""
    return int(cell) if re.fullmatch(r"[0-9]{1,4}", cell) else None
