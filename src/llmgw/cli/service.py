"""``llmgw agent install|uninstall``: the agent as a service of systemd."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("install")(install)
    app.command("uninstall")(uninstall)


def install(
    config: Annotated[Path, typer.Option("--config", "-c", help="The agent's file.")] = Path("/etc/llmgw/agent.yaml"),
    binary: Annotated[
        Path | None,
        typer.Option("--binary", help="The llmgw to run (left out: the one that is typed, or /usr/local/bin/llmgw)."),
    ] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the agent, too.")] = True,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start it anew also where nothing has changed. Its engines go on.")
    ] = False,
) -> None:
    """Have systemd run the agent: write its unit, enable it, start it. What is in order already is left alone."""
    from llmgw.agent.service import ServiceRefused
    from llmgw.agent.service.install import install as put_in_place

    if restart and not start:
        raise typer.BadParameter("--no-start and --restart ask for opposites", param_hint="--restart")
    try:
        installed = put_in_place(config, binary=binary, start=start, restart=restart)
    except ServiceRefused as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    for sentence in installed.done:
        typer.echo(sentence)


def uninstall(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The agent's file (left out: the one that its unit names).")
    ] = None,
    stop_engines: Annotated[
        bool, typer.Option("--stop-engines", help="Stop the engines that run here, as the agent would.")
    ] = False,
    leave_engines: Annotated[
        bool, typer.Option("--leave-engines", help="Leave the engines that run here running, with no agent.")
    ] = False,
) -> None:
    """Stop the agent and remove its unit; says what is left. Refused while engines run, unless told what of them."""
    from llmgw.agent.service import ServiceRefused
    from llmgw.agent.service.uninstall import uninstall as take_away
    from llmgw.cluster.wording import size

    if stop_engines and leave_engines:
        raise typer.BadParameter("--stop-engines and --leave-engines ask for opposites", param_hint="--leave-engines")
    try:
        told = take_away(config, stop_engines=stop_engines, leave_engines=leave_engines)
    except ServiceRefused as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    for sentence in told.done:
        typer.echo(sentence)
    if told.left:
        typer.echo("left on this machine, for you to keep or to remove:")
    for left in told.left:
        takes = f" ({size(left.size_bytes)})" if left.size_bytes else ""
        typer.echo(f"  {left.what}{takes}\n    {left.remove}")
