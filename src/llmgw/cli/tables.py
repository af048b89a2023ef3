"""How answers of the admin API look to a person. Widths follow the terminal; words wrap, names do not."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from llmgw.cli.rows import Column, print_rows

Row = dict[str, Any]

PIPE_WIDTH = 10_000

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
    """As wide as the terminal; into a pipe nothing is wrapped."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_json(answer: Any) -> None:
    print(json.dumps(answer, indent=2, ensure_ascii=False))


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


def _moment(at: str) -> str:
    """UTC, to the second."""
    return at.replace("T", " ").split(".")[0]


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
    columns = [Column("NODE"), Column("STATE"), Column("SINCE", 2), Column("GPUS"), Column("MEMORY", 1)]
    rows = [
        (
            found["id"],
            _state(found["state"]),
            _ago(found["since"]),
            _gpus(found["inventory"]),
            _size(_memory(found)),
            "; ".join([*(_engine(engine) for engine in found["engines"]), *_troubles(found)]),
        )
        for found in answer
    ]
    print_rows(out, columns, "ENGINES AND WHY", rows)
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


def _troubles(found: Row) -> list[str]:
    """Why a node is as it is, where it is not simply ready; and what it has not said yet."""
    unsaid = [] if found["engines"] else ["no engine" if found["probed"] else "has not said yet which engines it has"]
    return [*unsaid, *([found["why"]] if found["state"] != "ready" and found["why"] else [])]


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
    out.print(_title("node", answer))
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
        out.print(f"engine    {_no_engine(answer)}")
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
    columns = [Column("MODEL"), Column("READY"), Column("TASK", 2), Column("PROFILES", 1)]
    rows = []
    for found in answer:
        scaled = f" (file: {found['replicas_in_file']})" if found["scaled"] else ""
        enough = found["ready"] >= found["replicas"]
        rows.append(
            (
                ", ".join([found["name"], *found["aliases"]]),
                Text(f"{found['ready']}/{found['replicas']}{scaled}", style="green" if enough else "yellow"),
                found["task"],
                ", ".join(found["profiles"]),
                found["why"],
            )
        )
    print_rows(out, columns, "WHY", rows)


def replicas(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("there is no replica")
        return
    columns = [
        Column("REPLICA"),
        Column("STATE"),
        Column("SINCE", 2),
        Column("GEN", 3),
        Column("RESTARTS", 1),
        Column("NODES"),
        Column("ENDPOINT", 4),
    ]
    rows = [
        (
            found["id"],
            _state(found["state"]),
            _ago(found["since"]),
            str(found["generation"]),
            str(found["restarts"]),
            ", ".join(placement["node"] for placement in found["placements"]) or "-",
            found["endpoint"] or "-",
            found["why"],
        )
        for found in answer
    ]
    print_rows(out, columns, "WHY", rows)


def replica(answer: Row) -> None:
    out = console()
    out.print(_title("replica", answer))
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
    story = [
        (_moment(line["at"]), str(line["generation"]), _state(line["state"]), line["why"]) for line in answer["story"]
    ]
    print_rows(out, [Column("AT"), Column("GEN"), Column("STATE")], "WHY", story)


def engines(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("no node has reported an engine")
        return
    columns = [Column("ENGINE"), Column("VERSION"), Column("NODE"), Column("STATE")]
    rows = [(each["name"], each["version"], each["node"], _state(each["state"]), each["words"]) for each in answer]
    print_rows(out, columns, "WORDS", rows)


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


def events(answer: list[Row], subject: str | None = None) -> None:
    out = console()
    if not answer:
        out.print(f"no event is about {subject}" if subject else "nothing has happened yet")
        return
    columns = [Column("AT"), Column("KIND", 1), Column("SUBJECT", 2)]
    rows = [(_moment(event["at"]), event["kind"], event["subject"] or "-", event["words"]) for event in answer]
    print_rows(out, columns, "WORDS", rows)


def event_line(event: Row, *, as_json: bool) -> None:
    line = (
        json.dumps(event, ensure_ascii=False)
        if as_json
        else "  ".join((_moment(event["at"]), event["kind"], event["subject"] or "-", event["words"]))
    )
    print(line, flush=True)


def keys(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("there is no key: llmgw ctl key create NAME")
        return
    columns = [Column("KEY"), Column("CREATED"), Column("REVOKED"), Column("MODELS", 1)]
    rows = [
        (key["id"], _ago(key["created_at"]), _ago(key["revoked_at"]), ", ".join(key["models"]) or "all", key["name"])
        for key in answer
    ]
    print_rows(out, columns, "NAME", rows)
