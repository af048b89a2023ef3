"""How answers of the admin API look to a person. Widths follow the terminal; words wrap, names do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

Row = dict[str, Any]

_COLOURS = {
    "ready": "green",
    "installed": "green",
    "suspect": "yellow",
    "joining": "yellow",
    "draining": "yellow",
    "unplaced": "yellow",
    "lost": "red",
    "failed": "red",
    "revoked": "red",
}


def console() -> Console:
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def print_json(answer: Any) -> None:
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def _table(*columns: str, words: Sequence[str] = ("WHY",)) -> Table:
    """Columns named in ``words`` take the room that is left and wrap; the others keep to one line."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        wide = column in words
        table.add_column(
            column, no_wrap=not wide, overflow="fold", ratio=1 if wide else None, min_width=12 if wide else None
        )
    return table


def _state(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, ""))


def _ago(at: str | None) -> str:
    if at is None:
        return "-"
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{max(seconds, 0)}s"


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= length:
            return f"{count / length:.0f} {unit}" if count >= 10 * length else f"{count / length:.1f} {unit}"
    return f"{count} B"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(found.items())) or "none"


def status(answer: Row) -> None:
    out = console()
    out.print(f"cluster   {answer['cluster']} (llmgw v{answer['version']}, epoch {answer['epoch']})")
    out.print(f"nodes     {_counts(answer['nodes'])}")
    out.print(f"replicas  {_counts(answer['replicas'])}")
    out.print(f"models    {answer['models_ready']} of {answer['models']} ready")
    gateways = [
        f"{gateway['id']} ({gateway['address']}"
        + ("" if gateway["table_acked"] == answer["table_version"] else ", not yet told of the newest table")
        + ")"
        for gateway in answer["gateways"]
    ]
    out.print(f"gateways  {', '.join(gateways) or 'none connected'}")
    if answer["halting"]:
        out.print("[yellow]halting: every replica is being stopped[/]")
    if answer["trouble"]:
        out.print(Text(f"trouble   {answer['trouble']}", style="red"))


def nodes(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("no node is registered")
        return
    table = _table("NODE", "STATE", "SINCE", "GPUS", "MEMORY", "ENGINES", "WHY", words=("ENGINES", "WHY"))
    for found in answer:
        table.add_row(
            found["id"],
            _state(found["state"]),
            _ago(found["since"]),
            _gpus(found["inventory"]),
            _size(_memory(found)),
            "\n".join(_engine(engine) for engine in found["engines"])
            or ("none" if found["probed"] else "not said yet"),
            found["why"],
        )
    out.print(table)
    for found in answer:
        for warning in found["warnings"]:
            out.print(Text(f"warning: {found['id']}: {warning}", style="yellow"))


def _memory(found: Row) -> int | None:
    source = found["vitals"] or found["inventory"]
    return source["memory_bytes"] if source else None


def _gpus(inventory: Row | None) -> str:
    if inventory is None:
        return "?"
    usable = [gpu for gpu in inventory["gpus"] if not gpu["problem"]]
    broken = len(inventory["gpus"]) - len(usable)
    return f"{len(usable)}" + (f" (+{broken} broken)" if broken else "")


def _no_engine(found: Row) -> str:
    return "none" if found["probed"] else "not said yet"


def _engine(engine: Row) -> str:
    words = f"{engine['name']} {engine['version']}"
    return words if engine["state"] == "installed" else f"{words}: {engine['state']}: {engine['words']}"


def _title(what: str, answer: Row) -> Text:
    since = f" for {_ago(answer['since'])}"
    return Text.assemble(f"{what:<10}", (answer["id"], "bold"), "  ", _state(answer["state"]), since)


def node(answer: Row) -> None:
    out = console()
    out.print(
        Text.assemble(
            "node      ", (answer["id"], "bold"), "  ", _state(answer["state"]), f" for {_ago(answer['since'])}"
        )
    )
    if answer["why"]:
        out.print(f"why       {answer['why']}")
    connected = "" if answer["connected"] else ", not connected"
    silent = f", silent for {answer['silent_s']:g} s" if answer["silent_s"] is not None else ""
    out.print(f"agent     v{answer['agent_version']} from {answer['address']}{connected}{silent}")
    _machine(out, answer["inventory"], answer["vitals"])
    for engine in answer["engines"]:
        out.print(
            f"engine    {_engine(engine)}"
            + (f" ({engine['words']})" if engine["state"] == "installed" and engine["words"] else "")
        )
    if not answer["engines"]:
        out.print("engine    " + ("none" if answer["probed"] else "not said yet"))
    for shard in answer["shards"]:
        where = f" at {shard['endpoint']}" if shard["endpoint"] else ""
        pid = f", pid {shard['pid']}" if shard["pid"] else ""
        out.print(
            f"shard     {shard['id']} generation {shard['generation']}: {shard['state']}{where}{pid}: {shard['why']}"
        )
    for warning in answer["warnings"]:
        out.print(Text(f"warning   {warning}", style="yellow"))


def _machine(out: Console, inventory: Row | None, vitals: Row | None) -> None:
    if inventory is None:
        return
    cpu = inventory["cpu"]
    out.print(f"machine   {inventory['os']}, {inventory['kernel']}, {inventory['libc']}")
    out.print(
        f"address   {inventory['mgmt_addr']}"
        + (f" on {inventory['mgmt_interface']}" if inventory["mgmt_interface"] else "")
    )
    extensions = " ".join(cpu["extensions"]) or "no vector extensions"
    out.print(f"cpu       {cpu['model']} ({cpu['architecture']}), {cpu['cores']} cores, {extensions}")
    if vitals:
        out.print(f"memory    {_size(vitals['memory_available_bytes'])} available of {_size(vitals['memory_bytes'])}")
        out.print(f"disk      {_size(vitals['disk_free_bytes'])} free of {_size(vitals['disk_bytes'])}")
    for gpu in inventory["gpus"]:
        problem = f": {gpu['problem']}" if gpu["problem"] else ""
        out.print(f"gpu       {gpu['index']} {gpu['name']} {_size(gpu['memory_bytes'])}{problem}")
    for hca in inventory["hcas"]:
        rate = f"{hca['rate_gbps'] or '?'} Gb/s"
        out.print(f"hca       {hca['name']} port {hca['port']}: {hca['state']}, {rate}, {hca['link_layer']}")
    labels = ", ".join(f"{name}={value}" for name, value in inventory["labels"].items())
    if labels:
        out.print(f"labels    {labels}")


def models(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("the catalog is empty: name models in server.yaml")
        return
    table = _table("MODEL", "READY", "TASK", "PROFILES", "WHY", words=("WHY",))
    for found in answer:
        scaled = f" (file: {found['replicas_in_file']})" if found["scaled"] else ""
        table.add_row(
            "\n".join([found["name"], *(f"  = {alias}" for alias in found["aliases"])]),
            Text(
                f"{found['ready']}/{found['replicas']}{scaled}",
                style="green" if found["ready"] >= found["replicas"] else "yellow",
            ),
            found["task"],
            "\n".join(found["profiles"]),
            found["why"],
        )
    out.print(table)


def _enough(found: Row) -> str:
    return "green" if found["ready"] >= found["replicas"] else "yellow"


def replicas(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("there is no replica")
        return
    table = _table("REPLICA", "STATE", "SINCE", "GEN", "RESTARTS", "NODES", "ENDPOINT", "WHY")
    for found in answer:
        table.add_row(
            found["id"],
            _state(found["state"]),
            _ago(found["since"]),
            str(found["generation"]),
            str(found["restarts"]),
            "\n".join(placement["node"] for placement in found["placements"]) or "-",
            found["endpoint"] or "-",
            found["why"],
        )
    out.print(table)


def replica(answer: Row) -> None:
    out = console()
    out.print(
        Text.assemble(
            "replica   ", (answer["id"], "bold"), "  ", _state(answer["state"]), f" for {_ago(answer['since'])}"
        )
    )
    out.print(f"model     {answer['model']}, profile {answer['profile'] or '-'} ({answer['engine'] or '-'})")
    out.print(f"why       {answer['why']}")
    out.print(f"restarts  {answer['restarts']}" + (f", next try at {answer['retry_at']}" if answer["retry_at"] else ""))
    for rank, (placement, pid) in enumerate(zip(answer["placements"], answer["pids"], strict=True)):
        gpus = f", GPUs {placement['gpus']}" if placement["gpus"] else ""
        out.print(
            f"rank {rank}    {placement['node']} port {placement['port']}{gpus}" + (f", pid {pid}" if pid else "")
        )
    if answer["last_exit"]:
        exit = answer["last_exit"]
        out.print(f"last end  {exit['signal'] or 'status ' + str(exit['status'])}")
        for line in exit["last_lines"][-10:]:
            out.print(Text(f"          | {line}"))
    table = _table("AT", "GEN", "STATE", "WHY")
    for line in answer["story"]:
        table.add_row(line["at"], str(line["generation"]), _state(line["state"]), line["why"])
    out.print(table)


def engines(answer: list[Row]) -> None:
    table = _table("ENGINE", "VERSION", "NODE", "STATE", "WORDS", words=("WORDS",))
    for found in answer:
        table.add_row(found["name"], found["version"], found["node"], _state(found["state"]), found["words"])
    out = console()
    out.print(table if answer else "no node has reported an engine")


def why(answer: Row) -> None:
    out = console()
    tree = Tree(
        Text(f"{answer['model']}: {answer['ready']} of {answer['wanted']} ready")
        + Text(f": {answer['summary']}" if answer["summary"] else "")
    )
    for id, state, words in answer["replicas"]:
        tree.add(Text.assemble("replica ", (id, "bold"), " ", _state(state), f": {words}"))
    if refusal := answer["refusal"]:
        for profile in refusal["profiles"]:
            branch = tree.add(Text(f"profile {profile['profile']}: {profile['summary']}"))
            for refused in profile["nodes"]:
                branch.add(Text(f"{refused['node']}: {refused['words']}"))
    out.print(tree)


def events(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("nothing has happened yet")
        return
    table = _table("AT", "KIND", "SUBJECT", "WORDS", words=("WORDS",))
    for event in answer:
        table.add_row(
            event["at"].replace("T", " ").split(".")[0], event["kind"], event["subject"] or "-", event["words"]
        )
    out.print(table)


def event_line(event: Row, *, as_json: bool) -> None:
    line = (
        json.dumps(event, ensure_ascii=False)
        if as_json
        else "  ".join((event["at"], event["kind"], event["subject"] or "-", event["words"]))
    )
    print(line, flush=True)


def keys(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("there is no key: llmgw ctl key create NAME")
        return
    table = _table("KEY", "NAME", "CREATED", "REVOKED", "MODELS", words=("NAME", "MODELS"))
    for key in answer:
        table.add_row(
            key["id"], key["name"], _ago(key["created_at"]), _ago(key["revoked_at"]), ", ".join(key["models"]) or "all"
        )
    out.print(table)
