"""``llmgw ctl drain``: the plan first, then what becomes of it, line by line, and a report at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from llmgw.cli import drain_tables
from llmgw.cli.admin import Output, OutputOption, admin, complain, show
from llmgw.cli.durations import duration
from llmgw.cli.rows import console, fact
from llmgw.client import AdminClient, AdminError

LOOKED_EVERY_S = 0.5

View = dict[str, Any]


def drain(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The node to be emptied.")],
    plan: Annotated[bool, typer.Option("--plan", help="Only show what would be done. Changes nothing.")] = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="How long requests in flight may take at each replica: 10m, 30s (as the file says, without it).",
        ),
    ] = None,
    allow_downtime: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Its replicas may stop before there is another place (may be given again)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="The same for every model.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Where something can't move yet: begin by itself as soon as everything can.")
    ] = False,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--no-follow",
            help="Stay until it is done (so without either, but not with -o json). Ctrl-C leaves it going.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move every replica off a node, each replacement ready before the original stops. The plan is shown first."""
    options = {"allow_downtime": allow_downtime or [], "force": force, "wait": wait}
    if deadline is not None:
        options["in_flight_s"] = deadline
    with admin(context) as client:
        path = f"nodes/{node}/drain"
        planned = client.post(path, {**options, "plan": True})
        if plan or output is Output.TABLE:
            places = drain_tables.places_of(client.get("replicas"))
            show(planned, output, lambda planned: drain_tables.plan(planned, places))
        if planned["refusal"] is not None:
            complain(planned["refusal"])
            raise typer.Exit(1)
        if plan:
            return
        drain = client.post(path, {**options, "plan": False})
        if follow is False or (follow is None and output is Output.JSON):
            show(drain, output, drain_tables.begun)
            return
        with _left_going(node):
            done = _follow(client, node, drain, quiet=output is Output.JSON)
        show(done, output, drain_tables.report)


def undrain(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The node to be used again.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a drain back: the node takes replicas again. A replica whose requests are being finished still goes."""
    with admin(context) as client:
        answer = client.delete(f"nodes/{node}/drain")
    show(answer, output, lambda _: print(f"{node} takes replicas again; what has moved stays where it is"))


def drains(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Every drain: how far each replica is, and what it waits for."""
    with admin(context) as client:
        show(client.get("drains"), output, drain_tables.drains)


@contextmanager
def _left_going(node: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"\nthe drain of {node} goes on without this command: `llmgw ctl drains` shows how far it is, "
            f"`llmgw ctl undrain {node}` takes it back",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _follow(client: AdminClient, node: str, drain: View, *, quiet: bool) -> View:
    """Looks until the drain is done, and prints each step of each replica. Returns it as it ended.

    Raises AdminError where the drain was taken back, or the node is lost: that may be for good, and nothing goes on
    before it is back.
    """
    out = console()
    told: dict[str, tuple[str, ...]] = {}
    # What had moved before this was asked is no news.
    before = [move for move in drain["moves"] if move["state"] == "moved"]
    list(drain_tables.news({**drain, "state": "moving", "moves": before}, told))
    live = out.status("") if out.is_terminal and not quiet else None
    with live or nullcontext():
        while True:
            if not quiet:
                for line in drain_tables.news(drain, told):
                    fact(out, f"{datetime.now().astimezone():%H:%M:%S}", line)
            if drain["state"] == "done":
                return drain
            if drain["state"] == "moving" and drain["node_state"] == "lost":
                raise AdminError(
                    f"{node} is not drained yet: {drain['why']}",
                    hint=f"the drain goes on by itself then: `llmgw ctl drains` shows how far it is, "
                    f"`llmgw ctl undrain {node}` takes it back",
                )
            if live is not None:
                live.update(Text(drain_tables.now(drain)))
            time.sleep(LOOKED_EVERY_S)
            drain = _look(client, node)


def _look(client: AdminClient, node: str) -> View:
    """How the drain stands. It outlives its control plane, and so does the wait for it."""
    said = False
    while True:
        try:
            found: View = client.get(f"nodes/{node}/drain")
            return found
        except AdminError as error:
            if error.status == 404:
                raise AdminError(
                    f"the drain of {node} was taken back before it was done",
                    hint="`llmgw ctl events` says by what; what had begun to leave still goes",
                ) from None
            if error.status is not None and error.status < 500:
                raise
            if not said:
                complain(f"{error}\nthe drain goes on by itself; waiting to see it again")
                said = True
        time.sleep(LOOKED_EVERY_S)
