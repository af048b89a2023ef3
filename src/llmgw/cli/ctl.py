"""``llmgw ctl``: the operator's client. A bare noun lists; ``-o json`` prints what the admin API answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmgw.cli import drain, engines, node_tables, tables
from llmgw.cli.admin import Output, OutputOption, Where, admin, show
from llmgw.cli.cert import app as cert_app
from llmgw.cli.cert_cluster import node_token
from llmgw.cli.durations import duration
from llmgw.cli.engine_check import engine_check
from llmgw.cli.rows import console, fact
from llmgw.cli.what_if import what_if

ctl = typer.Typer(help="The operator's client.", no_args_is_help=True)
key_app = typer.Typer(help="Clients' API keys.", invoke_without_command=True)
replica_app = typer.Typer(help="One replica.", no_args_is_help=True)
brake_app = typer.Typer(
    help="The brake: while many nodes are silent at once, none is judged lost.", invoke_without_command=True
)
ctl.add_typer(cert_app, name="cert")
ctl.add_typer(engines.app, name="engines")
ctl.add_typer(key_app, name="key")
ctl.add_typer(replica_app, name="replica")
ctl.add_typer(brake_app, name="brake")
for command in (drain.drain, drain.undrain, drain.drains):
    ctl.command()(command)
ctl.command("what-if")(what_if)
ctl.command("engine-check")(engine_check)


@ctl.callback()
def where(
    context: typer.Context,
    server: Annotated[
        str | None, typer.Option(help="The admin API, such as http://127.0.0.1:8081 [LLMGW_SERVER].")
    ] = None,
    token: Annotated[str | None, typer.Option(help="The admin token [LLMGW_TOKEN].")] = None,
    ca: Annotated[str | None, typer.Option(help="The authority of an https server [LLMGW_CA].")] = None,
    context_file: Annotated[Path | None, typer.Option("--context", help="A context file [LLMGW_CONTEXT].")] = None,
) -> None:
    context.obj = Where(server, token, ca, context_file)


@ctl.command()
def status(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """The whole cluster in a few lines."""
    with admin(context) as client:
        show(client.get("status"), output, tables.status)


@ctl.command()
def nodes(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Every node: its state, what it has, and what it warns of."""
    with admin(context) as client:
        show(client.get("nodes"), output, node_tables.nodes)


@ctl.command()
def node(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[show|token|remove] NAME")] = None,
    ttl: Annotated[
        float | None,
        typer.Option("--ttl", parser=duration, metavar="DURATION", help="token: how long it is good [15m]."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="token: a label of the node (repeatable).")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--replace", help="token: the name is taken from the machine that has it.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """One node, whole; `token` lets a machine join by that name; `remove` forgets one that is gone for good, and
    revokes its certificates. Without a name: all of them."""
    verb, names = _verb_and_names(words or [])
    if len(names) > 1:
        raise typer.BadParameter(f"one node at a time: {' '.join(names)}")
    if verb == "token":
        if not names:
            raise typer.BadParameter("say which node: llmgw ctl node token NAME")
        node_token(context, names[0], ttl, label or [], take_over, output)
        return
    if ttl is not None or label or take_over:
        raise typer.BadParameter("--ttl, --label and --replace belong to `node token`")
    with admin(context) as client:
        if verb == "remove":
            if not names:
                raise typer.BadParameter("say which node: llmgw ctl node remove NAME")
            answer = client.delete(f"nodes/{names[0]}")
            show(answer, output, lambda _: print(f"{names[0]} is forgotten, and its certificates are revoked"))
        elif names:
            show(client.get(f"nodes/{names[0]}"), output, node_tables.node)
        else:
            show(client.get("nodes"), output, node_tables.nodes)


def _verb_and_names(words: list[str]) -> tuple[str, list[str]]:
    if words and words[0] in ("show", "token", "remove"):
        return words[0], words[1:]
    return "show", words


@ctl.command()
def models(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """The catalog: what is wanted, what is ready, and why not all of it."""
    with admin(context) as client:
        show(client.get("models"), output, tables.models)


@ctl.command()
def replicas(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Every replica: where it runs, and how it is."""
    with admin(context) as client:
        show(client.get("replicas"), output, tables.replicas)


@replica_app.command("show")
def replica_show(context: typer.Context, name: str, output: OutputOption = Output.TABLE) -> None:
    """One replica with its story."""
    with admin(context) as client:
        show(client.get(f"replicas/{name}"), output, tables.replica)


@ctl.command()
def why(context: typer.Context, model: str, output: OutputOption = Output.TABLE) -> None:
    """Why a model is not (all) ready: in the nodes' own words."""
    with admin(context) as client:
        show(client.get(f"models/{model}/why"), output, tables.why)


@ctl.command()
def scale(
    context: typer.Context,
    model: str,
    replicas: Annotated[int | None, typer.Argument(min=0)] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to what the file says.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run another number of replicas than the file says."""
    if (replicas is None) == (not reset):
        raise typer.BadParameter("give a number of replicas, or --reset")
    with admin(context) as client:
        path = f"models/{model}/scale"
        answer = client.delete(path) if reset else client.put(path, {"replicas": replicas})
        show([answer], output, tables.models)


@ctl.command()
def restart(
    context: typer.Context,
    model: str,
    allow_downtime: Annotated[
        bool, typer.Option("--allow-downtime", help="Stop each replica first where there is no room for another.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Replace a model's replicas by fresh ones, one at a time: the new one is ready before the old one goes."""
    with admin(context) as client:
        answer = client.post(f"models/{model}/restart", {"allow_downtime": allow_downtime})
    show(answer, output, lambda answer: fact(console(), "", answer["words"], indent=0))


@brake_app.callback()
def brake(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with admin(context) as client:
            tables.brake(client.get("status"))


@brake_app.command("release")
def brake_release(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """The silent nodes are gone indeed: judge them lost, and make their replicas elsewhere."""
    with admin(context) as client:
        answer = client.post("brake/release")
        show(answer, output, lambda _: tables.brake(client.get("status")))


@ctl.command()
def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000)] = 50,
    subject: Annotated[str | None, typer.Option(help="Only those of this node, replica, model or key.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """What happened, newest last."""
    about = {"subject": subject} if subject else {}
    with admin(context) as client:
        found = client.get("events", limit=lines, **about)
        if not follow:
            show(found, output, lambda found: tables.events(found, subject))
            return
        last = found[-1]["id"] if found else ""
        while True:
            for event in found:
                tables.event_line(event, as_json=output is Output.JSON)
            found = client.get("events", after=last, limit=1000, wait_s=20, **about)
            last = found[-1]["id"] if found else last


@ctl.command()
def logs(
    context: typer.Context,
    shard: Annotated[str, typer.Argument(help="REPLICA/RANK, or the replica alone for its rank 0.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100_000)] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """An engine's own output. As JSON: one object per line."""
    rank = shard.rpartition("/")[2]
    whole = shard if rank.isdigit() else f"{shard}/0"
    with admin(context) as client:
        for line in client.lines(f"shards/{whole}/logs", lines=lines, follow=follow):
            print(json.dumps({"line": line}) if output is Output.JSON else line, flush=follow)


@ctl.command()
def backup(context: typer.Context, file: Path, output: OutputOption = Output.TABLE) -> None:
    """Save a consistent copy of the store. Restoring it: docs/backup.md."""
    if file.exists():
        print(f"llmgw ctl: {file} exists already; name another file", file=sys.stderr)
        raise typer.Exit(1)
    with admin(context) as client:
        written = client.download("backup", file)
    answer = {"file": str(file), "bytes": written}
    show(answer, output, lambda _: print(f"{file}: {written} bytes"))


@ctl.command()
def halt(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Stop every replica. Nothing starts again until the control plane itself is started anew."""
    with admin(context) as client:
        show(client.post("halt"), output, tables.status)


@ctl.command()
def reload(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Have the control plane take up its changed file. A file that is not sound changes nothing."""
    with admin(context) as client:
        answer = client.post("reload")
    show(answer, output, lambda answer: print("; ".join(answer["changed"]) or "nothing changed"))


@key_app.callback()
def key(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        key_list(context)


@key_app.command("create")
def key_create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose or what for; for people.")],
    model: Annotated[list[str] | None, typer.Option(help="Only this model (may be given again).")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a key. It is shown this once; only its hash is kept."""
    with admin(context) as client:
        answer = client.post("keys", {"name": name, "models": model or []})
    show(answer, output, lambda answer: print(answer["key"]))


@key_app.command("list")
def key_list(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """Every key, without the key itself."""
    with admin(context) as client:
        show(client.get("keys"), output, tables.keys)


@key_app.command("revoke")
def key_revoke(context: typer.Context, id: str, output: OutputOption = Output.TABLE) -> None:
    """End a key: gateways refuse it from their next table on."""
    with admin(context) as client:
        answer = client.delete(f"keys/{id}")
        show([answer], output, tables.keys)
