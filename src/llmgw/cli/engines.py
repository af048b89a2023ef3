"""``llmgw ctl engines``: each version of each engine, how it stands and on which nodes; and back to the one before."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.text import Text

from llmgw.cli.admin import Output, OutputOption, admin, show
from llmgw.cli.node_tables import engine_state
from llmgw.cli.rows import Column, console, print_rows

app = typer.Typer(help="Versions of engines on nodes.", invoke_without_command=True)

Row = dict[str, Any]

ALIKE_NAMED = 3
"""So many of the nodes that say the same are named; the others are counted."""

_COLOURS = {"in effect": "green", "rolled back": "red", "unlisted": "dim"}


@app.callback()
def engines(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Every version of every engine: how it stands, on how many nodes it is, and what is amiss on the others."""
    if context.invoked_subcommand is None:
        with admin(context) as client:
            show(client.get("engines"), output, table)


@app.command()
def rollback(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The engine, as the file names it.")],
    reset: Annotated[bool, typer.Option("--reset", help="End a rollback: back to the file's version.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Go back to the version before the file's: replica by replica, each once its replacement is ready."""
    with admin(context) as client:
        show(client.post(f"engines/{name}/rollback", {"reset": reset}), output, table)


def table(answer: list[Row]) -> None:
    out = console()
    if not answer:
        out.print("the file lists no engine, and no node has reported one")
        return
    columns = [Column("ENGINE"), Column("VERSION"), Column("STANDING"), Column("NODES"), Column("REPLICAS", 1)]
    rows = [
        (
            each["name"],
            each["version"] or "-",
            Text(each["standing"], style=_COLOURS.get(each["standing"], "")),
            f"{each['installed']} of {each['wanted']}",
            str(each["replicas"]),
            "; ".join(_words(each)),
        )
        for each in answer
    ]
    print_rows(out, columns, "WORDS", rows)


def _words(view: Row) -> list[str]:
    """Why it was rolled back, and what nodes say on which it is not plainly installed: what most say once."""
    words = [view["why"]] if view["why"] else []
    said = {each["node"]: _said(each) for each in view["nodes"] if each["state"] != "installed"}
    for what, _ in Counter(said.values()).most_common():
        nodes = [node for node, says in said.items() if says == what]
        more = len(nodes) - ALIKE_NAMED
        named = nodes if more <= 1 else [*nodes[:ALIKE_NAMED], f"{more} more"]
        words.append(f"{', '.join(named)}: {what}")
    return words


def _said(each: Row) -> str:
    return str(each["words"]) if each["state"] == "not reported" else engine_state(each)
