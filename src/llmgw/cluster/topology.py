"""What is joined to what: GPUs inside a node (NVLink groups, NUMA nodes), and nodes by the fabrics they are on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address

from llmgw.cluster.model import Fabric, Gpu, Hca, Inventory

ETHERNET = "Ethernet"
_PREFIX_LETTERS = len("fe80:0000:0000:0000")
_GID_LETTERS = len("fe80:0000:0000:0000:0002:c903:00ef:5ed1")


def choose_gpus(free: Iterable[Gpu], wanted: int, together: int = 0) -> tuple[Gpu, ...]:
    """``wanted`` of the free GPUs, of which each ``together`` in a row (a tensor-parallel group) are close.

    From the smallest NVLink group that suffices, so that whole ones stay whole; else every tensor-parallel group from
    one NVLink group; else from one NUMA node; else from as few groups as can be. A single GPU is rather one that
    NVLink joins to no other. Their order is that of ranks on the node.
    """
    gpus = sorted(free, key=lambda gpu: gpu.index)
    assert len(gpus) >= wanted, f"{wanted} of {len(gpus)} GPUs"
    if wanted == 0:
        return ()
    linked = _grouped([gpu for gpu in gpus if gpu.nvlink_group is not None], _nvlink)
    lone = [gpu for gpu in gpus if gpu.nvlink_group is None]
    if wanted == 1:
        return _of_few([lone] if lone else linked, 1, 1, _numa) or ()
    in_one_node = _grouped([gpu for gpu in gpus if gpu.numa_node is not None], _numa)
    for unit in _units(wanted, together):
        chosen = _of_few(linked, wanted, unit, _numa)
        if chosen is not None:
            return chosen
    for unit in _units(wanted, together):
        chosen = _of_few(in_one_node, wanted, unit, _nvlink)
        if chosen is not None:
            return chosen
    return _of_few([*linked, lone], wanted, 1, _numa) or ()


def islands(free: Sequence[Gpu], wanted: int, together: int = 0) -> int:
    """How many NVLink groups the chosen GPUs would lie in; one that is in none counts as one of its own."""
    if wanted <= 1:
        return wanted
    groups = [gpu.nvlink_group for gpu in free]
    linked = set(groups) - {None}
    if any(groups.count(group) >= wanted for group in linked):
        return 1
    if not linked:
        return wanted
    chosen = [gpu.nvlink_group for gpu in choose_gpus(free, wanted, together)]
    return len(set(chosen) - {None}) + chosen.count(None)


def _nvlink(gpu: Gpu) -> int | None:
    return gpu.nvlink_group


def _numa(gpu: Gpu) -> int | None:
    return gpu.numa_node


def _units(wanted: int, together: int) -> tuple[int, ...]:
    return (wanted, together) if 1 < together < wanted and wanted % together == 0 else (wanted,)


def _grouped(gpus: Iterable[Gpu], of: Callable[[Gpu], Hashable]) -> list[list[Gpu]]:
    groups: dict[Hashable, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(of(gpu), []).append(gpu)
    return list(groups.values())


def _of_few(
    groups: Sequence[list[Gpu]], wanted: int, unit: int, inner: Callable[[Gpu], Hashable]
) -> tuple[Gpu, ...] | None:
    """``wanted`` GPUs from few groups, a multiple of ``unit`` from each; None where they don't have as many so.

    ``inner`` says by what those of one group are chosen in turn.
    """
    counts = _counts([len(group) for group in groups], wanted, unit)
    if counts is None:
        return None
    chosen: list[Gpu] = []
    for group, count in zip(groups, counts, strict=True):
        parts = _grouped(group, inner)
        from_each = _counts([len(part) for part in parts], count, 1) or []
        for part, few in zip(parts, from_each, strict=False):
            chosen += part[:few]
    return tuple(chosen)


def _counts(sizes: Sequence[int], wanted: int, unit: int) -> list[int] | None:
    """How many to take from each: all from the smallest that suffices, else the largest is used up first."""
    left, counts = list(sizes), [0] * len(sizes)
    while wanted:
        whole = [size // unit * unit for size in left]
        enough = [place for place, size in enumerate(whole) if size >= wanted]
        if enough:
            place = min(enough, key=lambda place: (left[place], place))
        else:
            place = max(range(len(whole)), key=lambda place: (whole[place], -place), default=-1)
        if place < 0 or whole[place] == 0:
            return None
        taken = min(whole[place], wanted)
        counts[place] += taken
        left[place] -= taken
        wanted -= taken
    return counts


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place on a fabric that its agent's file states."""

    fabric: str
    problem: str | None
    """Why replicas over several nodes can't use it, in words; None: they may."""
    subnets: frozenset[str]
    """First halves of the GIDs of its InfiniBand ports (``fe80:0000:0000:0000``), or "Ethernet"."""
    complete: bool
    """False where a port does not say what it is attached to, so that ``subnets`` may lack some."""


def seats(inventory: Inventory) -> tuple[Seat, ...]:
    """One for each fabric of the machine, in the order of the fabrics' names."""
    return tuple(_seat(fabric, inventory.hcas) for fabric in sorted(inventory.fabrics, key=lambda each: each.name))


def networks(members: Mapping[str, Seat]) -> dict[str, frozenset[str]]:
    """What the adapters of each node are attached to, of one fabric: those with equal answers can reach one another.

    Different subnets prove that two nodes are apart. Equal ones prove nothing (every subnet manager begins with the
    same prefix), which is why fabrics are stated. A node that does not say is counted to the one network that it can
    belong to, and where there are several it stays apart from all of them: that would be a guess.
    """
    known = {seat.subnets for seat in members.values() if seat.complete and seat.subnets}
    found = {}
    for node, seat in members.items():
        found[node] = seat.subnets
        if not (seat.complete and seat.subnets):
            possible = [subnets for subnets in known if seat.subnets <= subnets]
            if len(possible) == 1:
                found[node] = possible[0]
    return found


def _seat(fabric: Fabric, hcas: Sequence[Hca]) -> Seat:
    problems, subnets, complete = [], set(), True
    for name in fabric.hcas:
        ports = [hca for hca in hcas if hca.name == name]
        if not ports:
            problems.append(f"adapter {name} is not there")
        for port in ports:
            if not port.usable:
                problems.append(f"adapter {name} port {port.port} is {port.state}" + _more(port))
            attached = ETHERNET if port.link_layer == ETHERNET else _subnet(port)
            if attached is None:
                complete = False
            else:
                subnets.add(attached)
    return Seat(fabric.name, "; ".join(problems) or None, frozenset(subnets), complete)


def _more(port: Hca) -> str:
    return f" ({port.problem})" if port.problem else ""


def _subnet(port: Hca) -> str | None:
    if port.link_layer != "InfiniBand" or port.gid is None:
        return None
    if len(port.gid) == _GID_LETTERS:
        return port.gid[:_PREFIX_LETTERS].lower()
    try:
        return IPv6Address(port.gid).exploded[:_PREFIX_LETTERS]
    except AddressValueError:
        return None
