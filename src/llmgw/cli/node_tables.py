"""How nodes look to a person: what each is, what it has, and why it is as it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from llmgw.cli.rows import Column, ago, console, fact, print_rows, size, state_text, title

Row = dict[str, Any]


def nodes(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("no node is registered")
        return
    columns = [
        Column("NODE"),
        Column("STATE"),
        Column("SINCE", 2),
        Column("FREE GPUS"),
        Column("FABRICS", 1),
        Column("MEMORY", 3),
    ]
    rows = [
        (
            found["id"],
            state_text(found["state"]),
            ago(found["since"]),
            _gpus(found),
            _fabrics(found["inventory"]),
            size(_memory(found)),
            "; ".join([*_troubles(found), *(_engine(engine) for engine in found["engines"])]),
        )
        for found in answer
    ]
    print_rows(out, columns, "WHY AND ENGINES", rows)
    for found in answer:
        for warning in found["warnings"]:
            fact(out, "warning", Text(f"{found['id']}: {warning}", style="yellow"))


def _memory(found: Row) -> int | None:
    source = found["vitals"] or found["inventory"]
    return source["memory_bytes"] if source else None


def _gpus(found: Row) -> str:
    """``4 of 8``: those that nothing is placed on, of those that can be used."""
    if found["inventory"] is None:
        return "?"
    gpus = found["inventory"]["gpus"]
    if not gpus:
        return "-"
    usable = [gpu for gpu in gpus if not gpu["problem"]]
    broken = len(gpus) - len(usable)
    return f"{found['gpus_free']} of {len(usable)}" + (f" (+{broken} broken)" if broken else "")


def _fabrics(inventory: Row | None) -> Text:
    """The names of the fabrics, those in red that no replica over several nodes can use."""
    named = Text(", ").join(
        Text(fabric["name"], style="red" if _down(fabric, inventory["hcas"]) else "")
        for fabric in (inventory["fabrics"] if inventory else ())
        if inventory is not None
    )
    return named if named.plain else Text("-")


def _down(fabric: Row, hcas: list[Row]) -> list[str]:
    """Ports of the fabric's adapters that are known to carry nothing, and adapters that are not there."""
    missing = [name for name in fabric["hcas"] if all(hca["name"] != name for hca in hcas)]
    return [f"{name} is not there" for name in missing] + [
        f"{hca['name']} port {hca['port']} is {hca['state']}"
        for hca in hcas
        if hca["name"] in fabric["hcas"] and hca["state"] not in ("ACTIVE", "unknown")
    ]


def _troubles(found: Row) -> list[str]:
    """Why a node is as it is, where it is not simply ready; and what it has not said yet."""
    why = [_why(found)] if found["state"] != "ready" and found["why"] else []
    unsaid = [] if found["engines"] else ["no engine" if found["probed"] else "has not said yet which engines it has"]
    return [*why, *unsaid]


def _why(found: Row) -> str:
    """How long it was silent when it was judged grows old: a node that still is has been silent longer."""
    silent = found["state"] in ("suspect", "lost") and found["why"].startswith("silent for ")
    return f"silent for {found['silent_s']:.0f} s" if silent and found["silent_s"] is not None else str(found["why"])


def _no_engine(found: Row) -> str:
    return "none" if found["probed"] else "not said yet"


def _engine(engine: Row) -> str:
    own = " (own program)" if engine["named"] else ""
    which = f"{engine['name']} {engine['version']}{own}"
    return which if engine["state"] == "installed" else f"{which}: {engine_state(engine)}"


def engine_state(engine: Row) -> str:
    """How far an engine is; its state is not said twice, where its words begin with it."""
    state, words = engine["state"], engine["words"]
    return words if words.startswith(state) else f"{state}: {words}" if words else state


def node(answer: Row) -> None:
    out = console()
    fact(out, "", title("node", answer), indent=0)
    if answer["why"]:
        fact(out, "why", _why(answer))
    connected = "" if answer["connected"] else ", not connected"
    silent = f", silent for {answer['silent_s']:g} s" if answer["silent_s"] is not None else ""
    fact(out, "agent", f"v{answer['agent_version']} from {answer['address']}{connected}{silent}")
    if answer["inventory"] is not None:
        _machine(out, answer["inventory"], answer["vitals"])
    for engine in answer["engines"]:
        words = f" ({engine['words']})" if engine["state"] == "installed" and engine["words"] else ""
        fact(out, "engine", _engine(engine) + words)
    if not answer["engines"]:
        fact(out, "engine", _no_engine(answer))
    for shard in answer["shards"]:
        where = f" at {shard['endpoint']}" if shard["endpoint"] else ""
        pid = f", pid {shard['pid']}" if shard["pid"] else ""
        words = f"{shard['id']} generation {shard['generation']}: {shard['state']}{where}{pid}: {shard['why']}"
        fact(out, "shard", words)
    for held in answer["held"]:
        fact(out, "held", _held(held))
    for warning in answer["warnings"]:
        fact(out, "warning", Text(warning, style="yellow"))


def _held(held: Row) -> str:
    gpus = f"GPUs {', '.join(map(str, held['gpus']))}" if held["gpus"] else ""
    memory = f"{size(held['memory_bytes'])} of memory" if held["memory_bytes"] else ""
    return f"{' and '.join(filter(None, (gpus, memory))) or 'no GPUs'} for {held['shard']}, ports from {held['port']}"


def _machine(out: Console, inventory: Row, vitals: Row | None) -> None:
    cpu = inventory["cpu"]
    interface = f" on {inventory['mgmt_interface']}" if inventory["mgmt_interface"] else ""
    fact(out, "machine", f"{inventory['os']}, {inventory['kernel']}, {inventory['libc']}")
    fact(out, "address", f"{inventory['mgmt_addr']}{interface}")
    extensions = " ".join(cpu["extensions"]) or "no vector extensions"
    fact(out, "cpu", f"{cpu['model']} ({cpu['architecture']}), {cpu['cores']} cores, {extensions}")
    if vitals:
        available, memory = size(vitals["memory_available_bytes"]), size(vitals["memory_bytes"])
        fact(out, "memory", f"{available} available of {memory}")
        fact(out, "disk", f"{size(vitals['disk_free_bytes'])} free of {size(vitals['disk_bytes'])}")
    for gpu in inventory["gpus"]:
        fact(out, "gpu", _gpu(gpu))
    for hca in inventory["hcas"]:
        rate = f"{hca['rate_gbps'] or '?'} Gb/s"
        fact(out, "hca", f"{hca['name']} port {hca['port']}: {hca['state']}, {rate}, {hca['link_layer']}")
    for fabric in inventory["fabrics"]:
        down = _down(fabric, inventory["hcas"])
        words = f"{fabric['name']}: {', '.join(fabric['hcas'])}"
        unusable = f": no replica over several nodes can use it: {', '.join(down)}" if down else ""
        fact(out, "fabric", Text(words + unusable, style="yellow" if down else ""))
    labels = ", ".join(f"{name}={value}" for name, value in inventory["labels"].items())
    if labels:
        fact(out, "labels", labels)


def _gpu(gpu: Row) -> str:
    words = [f"{gpu['index']} {gpu['name']} {size(gpu['memory_bytes'])}"]
    if gpu["nvlink_group"] is not None:
        words.append(f"NVLink group {gpu['nvlink_group']}")
    if gpu["numa_node"] is not None:
        words.append(f"NUMA node {gpu['numa_node']}")
    return ", ".join(words) + (f": {gpu['problem']}" if gpu["problem"] else "")
