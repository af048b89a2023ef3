"""The ``llmgw`` command. Each subcommand imports what it needs when it is called: a help text should be quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmgw.cli import join, node_provision, service
from llmgw.cli.ctl import ctl
from llmgw.cli.node import node_app
from llmgw.cli.sim import CONTEXT_SETTINGS as SIM_SETTINGS
from llmgw.cli.sim import sim
from llmgw.version import version as this_version

app = typer.Typer(
    name="llmgw",
    help="Turns machines you own into one LLM service.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
agent_app = typer.Typer(help="The agent of a node.", invoke_without_command=True, no_args_is_help=False)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Only say whether the file is sound: exit status 0 or 1.")]


def main() -> None:
    # However it was started: a release has Python start the package.
    app(prog_name="llmgw")


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and nothing else.")
    ] = False,
) -> None:
    if version:
        print(f"llmgw {this_version().text}")
        raise typer.Exit


@app.command()
def server(
    config: ConfigOption = Path("/etc/llmgw/server.yaml"),
    check: CheckOption = False,
    new_admin_token: Annotated[
        bool, typer.Option("--new-admin-token", help="Make another admin token; the one before ends.")
    ] = False,
) -> None:
    """The control plane, and the gateway beside it."""
    from llmgw.cli import processes
    from llmgw.cli.check import check_server

    raise typer.Exit(check_server(config) if check else processes.run_server(config, new_admin_token))


@app.command()
def gateway(config: ConfigOption = Path("/etc/llmgw/server.yaml"), check: CheckOption = False) -> None:
    """A gateway process alone. `llmgw server` starts one by itself."""
    from llmgw.cli import processes
    from llmgw.cli.check import check_server

    raise typer.Exit(check_server(config) if check else processes.run_gateway(config))


@agent_app.callback()
def agent(
    context: typer.Context,
    config: ConfigOption = Path("/etc/llmgw/agent.yaml"),
    check: CheckOption = False,
) -> None:
    """The agent of a node: finds out what its machine is, and runs what the control plane wants there."""
    if context.invoked_subcommand is not None:
        return
    from llmgw.cli import processes
    from llmgw.cli.check import check_agent

    raise typer.Exit(check_agent(config) if check else processes.run_agent(config))


@agent_app.command("discover")
def agent_discover(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Look as this file says.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Print what this machine is, without a control plane."""
    from llmgw.cli.discover import run_discover

    if output not in ("table", "json"):
        raise typer.BadParameter(f"{output!r} is neither table nor json", param_hint="--output")
    raise typer.Exit(run_discover(config, output == "json"))


join.register(agent_app)
service.register(agent_app)
app.add_typer(agent_app, name="agent")
app.add_typer(ctl, name="ctl")
node_provision.register(node_app)
app.add_typer(node_app, name="node")


@app.command()
def up(
    dir: Annotated[Path | None, typer.Option("--dir", help="Where it keeps its state [~/.local/share/llmgw].")] = None,
    engine: Annotated[str | None, typer.Option(help="llamacpp, or sim (simulated: nothing is downloaded).")] = None,
    model: Annotated[Path | None, typer.Option(help="A GGUF file to serve.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the endpoint [8080].")] = None,
) -> None:
    """A cluster of one on this machine: control plane, gateway and agent, and a model that answers."""
    from llmgw.cli.up import run_up

    raise typer.Exit(run_up(dir, engine, model, port))


app.command(context_settings=SIM_SETTINGS)(sim)
