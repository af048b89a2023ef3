"""How answers of the admin API look to a person. Widths follow the terminal; words wrap, names do not."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from llmgw.cli.rows import Column, ago, amount, console, fact, print_rows, state_text, title

Row = dict[str, Any]

MODELS_NAMED = 5
"""So many of the models that lack replicas the status names."""


def print_json(answer: Any) -> None:
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def _moment(at: str) -> str:
    """UTC, to the second."""
    return at.replace("T", " ").split(".")[0]


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(found.items())) or "none"


def status(answer: Row) -> None:
    out = console()
    if brake := answer["brake"]:
        _brake(out, brake)
    fact(out, "cluster", f"{answer['cluster']} (llmgw v{answer['version']}, epoch {answer['epoch']})")
    fact(out, "nodes", _counts(answer["nodes"]))
    fact(out, "replicas", _counts(answer["replicas"]))
    fact(out, "models", _models_ready(answer))
    for name, words in answer["rolled_back"].items():
        fact(out, "engine", Text(f"{name} is rolled back {words}", style="yellow"))
    gateways = [_gateway(gateway, answer["table_version"]) for gateway in answer["gateways"]]
    fact(out, "gateways", ", ".join(gateways) or "none connected")
    for drain in answer["drains"]:
        node = f"{drain['node']} is drained" if drain["state"] == "done" else drain["node"]
        fact(out, "drain", f"{node}: {drain['why'] or drain['state']}")
    if answer["halting"]:
        fact(out, "halting", Text("every replica is being stopped", style="yellow"))
    if answer["trouble"]:
        fact(out, "trouble", Text(answer["trouble"], style="red"))


def _models_ready(answer: Row) -> Text:
    """A model counts with one ready replica; those that want more are named."""
    words = Text(f"{answer['models_ready']} of {answer['models']} ready")
    lacking = [f"{count} of {model}" for model, count in sorted(answer["lacking"].items())]
    if lacking:
        named = lacking[:MODELS_NAMED] + [f"and of {len(lacking) - MODELS_NAMED} models more"] * (
            len(lacking) > MODELS_NAMED
        )
        words.append(f"; replicas that are missing: {', '.join(named)} (llmgw ctl why MODEL)", "yellow")
    return words


def _gateway(gateway: Row, table_version: int) -> str:
    words = [gateway["address"]]
    if not gateway["connected"]:
        left = gateway["may_send_for_s"]
        still = f", and may send by its last table for {left:.0f} s more" if left else ""
        words = [f"not connected{still}"]
    elif gateway["table_acked"] != table_version:
        words.append("not yet told of the newest table")
    if gateway["in_flight"]:
        words.append(f"{gateway['in_flight']} requests in flight at replicas that leave")
    return f"{gateway['id']} ({', '.join(words)})"


def _brake(out: Console, brake: Row) -> None:
    silent = ", ".join(brake["silent"])
    if brake["released"]:
        words = f"released: silent nodes are judged as ever, and lost ones made up for elsewhere ({silent})"
        fact(out, "BRAKE", Text(words, style="yellow"))
        return
    fact(out, "BRAKE", Text(f"on for {ago(brake['since'])}: {brake['words']}", style="bold red"))
    fact(out, "", Text(f"silent: {silent}", style="red"))
    fact(out, "", Text("it comes off by itself as they return", style="red"))


def brake(answer: Row) -> None:
    """Out of the whole status."""
    out = console()
    if found := answer["brake"]:
        _brake(out, found)
    else:
        out.print("the brake is off: silent nodes are judged one by one")


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
        Column("SINCE", 3),
        Column("GEN", 4),
        Column("RESTARTS", 2),
        Column("RUN/WAIT", 3),
        Column("TOKENS", 7),
        Column("NODES", 1),
        Column("FABRIC", 6),
        Column("ENDPOINT", 5),
    ]
    rows = [
        (
            found["id"],
            state_text(found["state"]),
            ago(found["since"]),
            str(found["generation"]),
            str(found["restarts"]),
            _busy(found["load"]),
            _tokens(found["load"]),
            ", ".join(placement["node"] for placement in found["placements"]) or "-",
            found["fabric"] or "-",
            found["endpoint"] or "-",
            "; ".join([found["why"], *_leaves(found)]),
        )
        for found in answer
    ]
    print_rows(out, columns, "WHY", rows)


def _busy(load: Row | None) -> str:
    """Requests that run, and that wait."""
    if load is None or load["running"] is None:
        return "-"
    return f"{load['running']:.0f}/{'?' if load['waiting'] is None else format(load['waiting'], '.0f')}"


def _tokens(load: Row | None) -> str:
    """Given out since its engine started."""
    return "-" if load is None or load["generation_tokens_total"] is None else amount(load["generation_tokens_total"])


def _load(load: Row) -> str:
    """What the engine tells; what it does not tell is left out."""
    kv_used = load["kv_used_ratio"]
    told = (
        _counted(load["running"], "running"),
        _counted(load["waiting"], "waiting"),
        f"{kv_used:.0%} of its cache taken" if kv_used is not None else "",
        _counted(load["prompt_tokens_total"], "tokens read"),
        _counted(load["generation_tokens_total"], "given out"),
    )
    return ", ".join(words for words in told if words)


def _counted(count: float | None, what: str) -> str:
    return f"{amount(count)} {what}" if count is not None else ""


def _leaves(found: Row) -> list[str]:
    return [f"waits for {words}" for words in found["waits_for"]]


def _engine(found: Row) -> str:
    return f"{found['engine'] or '-'} {found['engine_version'] or ''}".strip()


def replica(answer: Row) -> None:
    out = console()
    out.print(title("replica", answer))
    fact(out, "model", f"{answer['model']}, profile {answer['profile'] or '-'} ({_engine(answer)})")
    fact(out, "why", answer["why"])
    for words in answer["waits_for"]:
        fact(out, "waits for", words)
    if answer["replaces"]:
        fact(out, "replaces", answer["replaces"])
    if answer["lost"]:
        fact(out, "lost", "what became of it is known only once its nodes are back")
    fact(
        out, "restarts", str(answer["restarts"]) + (f", next try at {answer['retry_at']}" if answer["retry_at"] else "")
    )
    if answer["load"]:
        fact(out, "load", _load(answer["load"]))
    if answer["fabric"]:
        fact(out, "fabric", f"{answer['fabric']}, its ranks meet at {answer['dist_init']}")
    for rank, (placement, pid) in enumerate(zip(answer["placements"], answer["pids"], strict=True)):
        gpus = f", GPUs {', '.join(map(str, placement['gpus']))}" if placement["gpus"] else ""
        process = f", pid {pid}" if pid else ""
        fact(out, f"rank {rank}", f"{placement['node']} port {placement['port']}{gpus}{process}")
    if answer["last_exit"]:
        exit = answer["last_exit"]
        fact(out, "last end", exit["signal"] or f"status {exit['status']}")
        for line in exit["last_lines"][-10:]:
            fact(out, "", f"| {line}")
    story = [
        (_moment(line["at"]), str(line["generation"]), state_text(line["state"]), line["why"])
        for line in answer["story"]
    ]
    print_rows(out, [Column("AT"), Column("GEN"), Column("STATE")], "WHY", story)


def why(answer: Row) -> None:
    out = console()
    tree = Tree(
        Text(f"{answer['model']}: {answer['ready']} of {answer['wanted']} ready")
        + Text(f": {answer['summary']}" if answer["summary"] else "")
    )
    for id, state, words in answer["replicas"]:
        tree.add(Text.assemble("replica ", (id, "bold"), " ", state_text(state), f": {words}"))
    if refusal := answer["refusal"]:
        for profile in refusal["profiles"]:
            branch = tree.add(Text(f"profile {profile['profile']}: {profile['summary']}"))
            for fabric in profile["fabrics"]:
                name, summary = fabric["fabric"], fabric["summary"]
                words = summary if summary.startswith(f"{name} ") else f"{name}: {summary}"
                twig = branch.add(Text(f"fabric {words}"))
                _refused_nodes(twig, fabric["nodes"])
            _refused_nodes(branch, profile["nodes"])
    out.print(tree)


def _refused_nodes(branch: Tree, nodes: list[Row]) -> None:
    for refused in nodes:
        branch.add(Text(f"{refused['node']}: {refused['words']}"))


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
        (key["id"], ago(key["created_at"]), ago(key["revoked_at"]), ", ".join(key["models"]) or "all", key["name"])
        for key in answer
    ]
    print_rows(out, columns, "NAME", rows)
