"""InfiniBand and RoCE adapters under /sys/class/infiniband (Linux: ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmgw.agent.discovery.bounded import Gate, StillHanging
from llmgw.agent.discovery.files import Unreadable, names_in, read, read_text
from llmgw.agent.discovery.settings import DiscoveryRefused
from llmgw.cluster.model import Fabric, Hca

_NUMBERED = re.compile(r"([0-9]{1,2}):\s*(\w+)")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*Gb/sec(?:\s*\(([0-9]{1,2})X\b.*)?")
_GID = re.compile(r"(?:[0-9a-f]{4}:){7}[0-9a-f]{4}")
_GIDS_LOOKED_AT = 32
_LIMIT_S = 10.0
# Reading a port's state can ask the adapter's firmware, which may be wedged.
_gate = Gate("reading the InfiniBand adapters")

NO_SUBNET_MANAGER = "cable in, no subnet manager has swept"


@dataclass(frozen=True, slots=True)
class Rate:
    gbps: float
    lanes: int | None


def parse_numbered(text: str) -> str | None:
    """ "4: ACTIVE" as "ACTIVE"; None where it is something else."""
    match = _NUMBERED.match(text.strip())
    return match[2] if match else None


def parse_rate(text: str) -> Rate | None:
    """ "200 Gb/sec (4X HDR)"."""
    match = _RATE.match(text.strip())
    if match is None or float(match[1]) == 0:
        return None
    return Rate(float(match[1]), int(match[2]) if match[2] else None)


def parse_gid(text: str) -> str | None:
    """Eight groups of four hex digits; an empty slot (all zero, or a prefix without an interface id) is None."""
    gid = text.strip().lower()
    return gid if _GID.fullmatch(gid) and not gid.endswith("0000:0000:0000:0000") else None


async def find_hcas(ib_root: Path) -> tuple[Hca, ...] | None:
    """All ports of all adapters, () where there are none; None where they do not answer."""
    try:
        return await _gate.call_async(lambda: read_hcas(ib_root), _LIMIT_S)
    except StillHanging:
        return None


def read_hcas(ib_root: Path) -> tuple[Hca, ...]:
    return tuple(
        hca for name in names_in(ib_root) if (ib_root / name).is_dir() for hca in _read_adapter(ib_root / name)
    )


def check_fabrics(fabrics: Sequence[Fabric], hcas: Sequence[Hca], ib_root: Path) -> None:
    """Raises DiscoveryRefused where a fabric names an adapter that the machine does not have."""
    if words := _missing(fabrics, hcas, ib_root):
        raise DiscoveryRefused("; ".join(words))


def warn_about_hcas(fabrics: Sequence[Fabric], hcas: Sequence[Hca], ib_root: Path) -> tuple[str, ...]:
    """What is wrong with ports that somebody counts on: those of stated fabrics, and InfiniBand that is plugged in."""
    stated = {name: fabric.name for fabric in fabrics for name in fabric.hcas}
    of_ports = tuple(
        f"{hca.name} port {hca.port}: {hca.problem}{_what_follows(hca, stated.get(hca.name))}"
        for hca in hcas
        if hca.problem is not None and (hca.name in stated or hca.link_layer != "Ethernet")
    )
    return (*_missing(fabrics, hcas, ib_root), *of_ports, *_slow(fabrics, hcas))


def _what_follows(hca: Hca, fabric: str | None) -> str:
    if fabric is None or hca.state == "ACTIVE":
        return ""
    if hca.state == "unknown":
        return f"; fabric {fabric} is taken on trust here, unverified"
    return f"; until it is ACTIVE, this node takes part in no replica over several nodes on fabric {fabric}"


def warn_about_silence(ib_root: Path) -> tuple[str, ...]:
    return (f"the adapters under {ib_root} do not answer: firmware or driver may hang (see dmesg)",)


def with_rates(fabrics: Sequence[Fabric], hcas: Sequence[Hca]) -> tuple[Fabric, ...]:
    """A fabric without a stated rate gets that of its slowest active port."""
    return tuple(
        fabric if fabric.rate_gbps is not None else replace(fabric, rate_gbps=_measured(fabric, hcas))
        for fabric in fabrics
    )


def _missing(fabrics: Sequence[Fabric], hcas: Sequence[Hca], ib_root: Path) -> tuple[str, ...]:
    present = list(dict.fromkeys(hca.name for hca in hcas))
    has = f"it has {', '.join(present)}" if present else "it has none"
    return tuple(
        f"fabric {fabric.name} names the adapter {name}, which is not under {ib_root} on this machine ({has}): "
        "correct `fabrics` in the agent's file, or look for the adapter with lspci. Fabrics are never guessed, since "
        "a wrong one makes a replica that starts, passes its health checks, and hangs at its first all-reduce"
        for fabric in fabrics
        for name in fabric.hcas
        if name not in present
    )


def _slow(fabrics: Sequence[Fabric], hcas: Sequence[Hca]) -> Iterable[str]:
    for fabric in fabrics:
        for hca in hcas:
            if hca.name not in fabric.hcas or hca.state != "ACTIVE" or hca.rate_gbps is None:
                continue
            if fabric.rate_gbps is not None and hca.rate_gbps < fabric.rate_gbps:
                yield (
                    f"{hca.name} port {hca.port} runs at {hca.rate_gbps:g} Gb/s, "
                    f"but fabric {fabric.name} states {fabric.rate_gbps:g}"
                )


def _measured(fabric: Fabric, hcas: Sequence[Hca]) -> float | None:
    rates = (hca.rate_gbps for hca in hcas if hca.name in fabric.hcas and hca.state == "ACTIVE")
    return min((rate for rate in rates if rate is not None), default=None)


def _read_adapter(adapter: Path) -> Iterable[Hca]:
    if (parse_numbered(read_text(adapter / "node_type") or "") or "CA") in ("switch", "router"):
        return
    numa = read_text(adapter / "device/numa_node") or ""
    numa_node = int(numa) if re.fullmatch(r"[0-9]{1,4}", numa) else None
    ports = [name for name in names_in(adapter / "ports") if re.fullmatch(r"[0-9]{1,3}", name)]
    if not ports:
        yield Hca(name=adapter.name, port=1, state="unknown", numa_node=numa_node, problem="the kernel shows no ports")
    for port in sorted(ports, key=int):
        yield _read_port(adapter.name, adapter / "ports" / port, numa_node)


def _read_port(name: str, folder: Path, numa_node: int | None) -> Hca:
    state_text = read(folder / "state")
    state = parse_numbered(state_text) if isinstance(state_text, str) else None
    phys_state = parse_numbered(read_text(folder / "phys_state") or "") or "unknown"
    link_layer = read_text(folder / "link_layer") or "unknown"
    rate = parse_rate(read_text(folder / "rate") or "")
    return Hca(
        name=name,
        port=int(folder.name),
        state=state or "unknown",
        phys_state=phys_state,
        link_layer=link_layer,
        rate_gbps=rate.gbps if rate else None,
        gid=_read_gid(folder, link_layer),
        numa_node=numa_node,
        problem=_unread(state_text) if state is None else port_problem(state, phys_state, link_layer, rate),
    )


def port_problem(state: str, phys_state: str, link_layer: str, rate: Rate | None) -> str | None:
    """Why a port can't be used, in words; None where it can."""
    if state == "ACTIVE":
        if rate is not None and rate.lanes == 1:
            return f"runs at 1X ({rate.gbps:g} Gb/s): a bad cable or a failed negotiation"
        return None
    if state == "INIT" and phys_state == "LinkUp" and link_layer != "Ethernet":
        return f"{NO_SUBNET_MANAGER}: start opensm (or the switch's own) for this fabric"
    if state == "DOWN":
        if phys_state == "Disabled":
            return "down: the port is disabled"
        return f"down ({phys_state}): no cable, or nothing at its other end"
    return f"not usable in state {state} ({phys_state})"


def _unread(state: str | Unreadable) -> str:
    if isinstance(state, Unreadable):
        return f"its state can't be read ({state.why})"
    return f"its state reads {state[:40]!r}"


def _read_gid(folder: Path, link_layer: str) -> str | None:
    """Of InfiniBand the first; of RoCE rather one of version 2 over IPv4, which routers and NCCL like best."""
    slots = sorted((name for name in names_in(folder / "gids") if re.fullmatch(r"[0-9]{1,4}", name)), key=int)
    gids = ((slot, parse_gid(read_text(folder / "gids" / slot) or "")) for slot in slots[:_GIDS_LOOKED_AT])
    found = [(slot, gid) for slot, gid in gids if gid is not None]
    if link_layer == "Ethernet":
        for slot, gid in found:
            if ":ffff:" in gid and read_text(folder / "gid_attrs/types" / slot) == "RoCE v2":
                return gid
    return found[0][1] if found else None
