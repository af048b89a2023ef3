"""How drains look to a person: the plan, each step as it happens, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from llmgw.cli.rows import Column, console, fact, print_rows, state_text

View = dict[str, Any]

_PHASES = ("starting", "shifting", "finishing", "stopping")


def places_of(replicas: list[View]) -> dict[str, str]:
    """Of each replica, by id: the nodes that it is on, by rank."""
    return {found["id"]: ", ".join(_nodes(found)) for found in replicas}


def _nodes(replica: View) -> list[str]:
    return [placement["node"] for placement in replica["placements"]]


def plan(drain: View, places: Mapping[str, str]) -> None:
    """Where each replica goes, or why it can't."""
    out = console()
    moves = [move for move in drain["moves"] if move["state"] != "moved"]
    if not moves:
        drained = {"drained": "it is drained", "lost": "it is lost, and drained once it is back"}
        words = drained.get(drain["node_state"], "it is drained as soon as that is asked for")
        out.print(f"nothing is placed on {drain['node']}: {words}")
        return
    columns = [Column("REPLICA"), Column("MODEL", 2), Column("FROM", 3), Column("TO"), Column("WEIGHTS", 1)]
    rows = [
        (
            move["replica"],
            move["model"],
            places.get(move["replica"]) or drain["node"],
            _to(move),
            "-" if not move["targets"] else "there" if move["weights_there"] else "to load",
            Text(move["why"], style="red" if move["state"] == "blocked" else ""),
        )
        for move in moves
    ]
    print_rows(out, columns, "WHY", rows)


def _to(move: View) -> Text:
    if move["targets"]:
        return Text(", ".join(move["targets"]) + (" (stops first)" if move["downtime"] else ""))
    if move["state"] == "blocked":
        return Text("nowhere", style="red")
    return Text("stops first" if move["downtime"] else "-", style="yellow" if move["downtime"] else "")


def begun(drain: View) -> None:
    """What to do next, where nobody stays to watch."""
    out = console()
    fact(out, "drain", f"{drain['node']}: {drain['state']}: {drain['why']}")
    fact(out, "next", f"`llmgw ctl drains` shows how far it is, `llmgw ctl undrain {drain['node']}` takes it back")


def drains(answer: list[View]) -> None:
    out = console()
    if not answer:
        out.print("no node is being drained: llmgw ctl drain NODE")
        return
    for number, drain in enumerate(answer):
        if number:
            out.print()
        options = [f"{drain['in_flight_s']:g} s for requests in flight"]
        options += ["--wait"] * drain["wait"] + ["--force"] * drain["force"]
        options += [f"--allow-downtime {model}" for model in drain["allow_downtime"]]
        fact(out, "node", Text.assemble((drain["node"], "bold"), " is ", state_text(drain["node_state"])))
        fact(out, "drain", Text.assemble(state_text(drain["state"]), f": {drain['why']}" if drain["why"] else ""))
        fact(out, "options", ", ".join(options))
        if drain["moves"]:
            _moves(drain)


def _moves(drain: View) -> None:
    columns = [
        Column("REPLICA"),
        Column("MODEL", 2),
        Column("STATE"),
        Column("REPLACEMENT", 3),
        Column("TO", 1),
        Column("IN FLIGHT", 4),
    ]
    rows = [
        (
            move["replica"],
            move["model"],
            state_text(move["state"]),
            move["replacement"] or "-",
            ", ".join(move["targets"]) or "-",
            str(move["in_flight"]),
            move["why"],
        )
        for move in drain["moves"]
    ]
    print_rows(console(), columns, "WHY", rows)


def news(drain: View, told: dict[str, tuple[str, ...]]) -> Iterator[Text]:
    """A line for whatever has changed since ``told``, which is brought up to date."""
    for move in drain["moves"]:
        waits = "" if move["state"] == "finishing" else move["why"]
        said = (move["state"], move["replacement"] or "", waits)
        if told.get(move["replica"]) == said or (move["state"] == "pending" and move["replica"] not in told):
            continue
        told[move["replica"]] = said
        words = move["why"] or _phase_words(move)
        yield Text.assemble((move["replica"], "bold"), "  ", state_text(move["state"]), f"  {words}" if words else "")
    of_drain = (drain["state"], drain["why"] if drain["state"] == "waiting" else "")
    if told.get("") != of_drain and drain["state"] == "waiting":
        yield Text(f"waiting  {drain['why']}")
    told[""] = of_drain


def _phase_words(move: View) -> str:
    return f"on {', '.join(move['targets'])}" if move["targets"] else ""


def now(drain: View) -> str:
    """What is waited for at this moment, in one line."""
    for move in drain["moves"]:
        if move["state"] in _PHASES:
            in_flight = f", {move['in_flight']} in flight" if move["in_flight"] else ""
            return f"{move['replica']}: {move['state']}{in_flight}"
    return f"{drain['node']}: {drain['state']}"


def report(drain: View) -> None:
    """What became of it."""
    out = console()
    moves = drain["moves"]
    if moves:
        columns = [Column("REPLICA"), Column("MODEL", 1), Column("FINISHED"), Column("BROKEN"), Column("SECONDS", 2)]
        rows = [
            (
                move["replica"],
                move["model"],
                str(move["finished"]),
                Text(str(move["broken"]), style="red" if move["broken"] else ""),
                _seconds(move["seconds"]),
                move["why"],
            )
            for move in moves
        ]
        print_rows(out, columns, "WHAT BECAME OF IT", rows)
    style = "red" if any(move["broken"] for move in moves) else "green"
    fact(out, "", Text(f"{drain['node']} is drained: {drain['why']}", style=style), indent=0)
    fact(out, "", f"`llmgw ctl undrain {drain['node']}` puts it back to use", indent=0)


def _seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {seconds[phase]:.1f}" for phase in _PHASES if phase in seconds) or "-"
