"""``llmgw ctl what-if``: the planner on a copy of the cluster that is changed as asked. Changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from llmgw.cli.admin import Output, OutputOption, admin, show
from llmgw.cli.rows import Column, console, fact, print_rows

_ADDED = re.compile(r"(?P<nodes>[0-9]{1,6})\s*[x×*]\s*(?P<gpus>[0-9]{1,4})(?:\s*@\s*(?P<fabric>\S+))?", re.IGNORECASE)


def added_nodes(text: str) -> dict[str, Any]:
    """``2x8@ib-a``: two nodes of eight GPUs each on that fabric; without ``@`` on none. Raises BadParameter."""
    match = _ADDED.fullmatch(text.strip())
    if match is None or int(match["nodes"]) == 0:
        raise typer.BadParameter(
            f"{text!r}: expected nodes × GPUs of each, and the fabric that they share, such as 2x8@ib-a or 4x8"
        )
    return {"nodes": int(match["nodes"]), "gpus": int(match["gpus"]), "fabric": match["fabric"]}


def what_if(
    context: typer.Context,
    lose: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Without this node (may be given again).")
    ] = None,
    lose_fabric: Annotated[
        list[str] | None, typer.Option(metavar="FABRIC", help="Without this fabric (may be given again).")
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option(metavar="N×GPUS@FABRIC", help="With such nodes more: 2x8@ib-a, or 4x8.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="SERVER.YAML", help="With the models of this file.", dir_okay=False)
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """What would move, and what would not fit, if the cluster were another. Changes nothing."""
    added = [added_nodes(text) for text in add or []]
    if not (lose or lose_fabric or added or file):
        raise typer.BadParameter("say what to suppose: --lose, --lose-fabric, --add or --file")
    with admin(context) as client:
        body: dict[str, Any] = {"lose": lose or [], "lose_fabrics": lose_fabric or [], "add": added}
        if file is not None:
            body |= {"file": _text_of(file), "file_name": str(file)}
        show(client.post("what-if", body), output, table)


def _text_of(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is no text", param_hint="--file") from None


def table(answer: dict[str, Any]) -> None:
    out = console()
    for words in answer["supposed"]:
        fact(out, "suppose", Text(words, style="dim"))
    rows = [*map(_moves, answer["moves"]), *map(_new, answer["new"]), *map(_stops, answer["stops"])]
    if rows:
        columns = [
            Column("WHAT"),
            Column("REPLICA"),
            Column("MODEL", 3),
            Column("FROM", 1),
            Column("TO"),
            Column("FABRIC", 4),
            Column("WEIGHTS", 2),
        ]
        print_rows(out, columns, "WHY", rows)
    elif not answer["unplaced"]:
        out.print("nothing would change: no replica would move, stop or be new")
    if answer["unplaced"]:
        if rows:
            out.print()
        homeless = [_homeless(each) for each in answer["unplaced"]]
        columns = [Column("WHAT"), Column("MODEL"), Column("REPLICAS"), Column("ALREADY NOW")]
        print_rows(out, columns, "WHY", homeless)


def _moves(move: dict[str, Any]) -> tuple[Text | str, ...]:
    to = ", ".join(move["to_nodes"]) + (" (no room beside it)" if move["downtime"] else "")
    there = (", ".join(move["from_nodes"]) or "-", to, move["fabric"] or "-")
    return (Text("moves", style="yellow"), move["replica"], move["model"], *there, _weights(move), move["why"])


def _new(new: dict[str, Any]) -> tuple[Text | str, ...]:
    there = ("-", ", ".join(new["to_nodes"]), new["fabric"] or "-")
    return (Text("new", style="green"), new["replica"], new["model"], *there, _weights(new), "")


def _stops(stop: dict[str, Any]) -> tuple[Text | str, ...]:
    there = (", ".join(stop["nodes"]) or "-", "-", "-")
    return (Text("stops", style="red"), stop["replica"], stop["model"], *there, "-", stop["why"])


def _homeless(short: dict[str, Any]) -> tuple[Text | str, ...]:
    counts = (str(short["replicas"]), str(short["already"]))
    return (Text("no place", style="red"), short["model"], *counts, short["refusal"]["summary"])


def _weights(move: dict[str, Any]) -> str:
    return "there" if move["weights_there"] else "to load"
