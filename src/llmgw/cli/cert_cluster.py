"""The verbs of ``llmgw ctl cert`` that ask a control plane, and ``ctl node token``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from llmgw.cli.admin import Output, OutputOption, admin, show
from llmgw.cli.rows import Column, ago, console, fact, print_rows, state_text
from llmgw.pki.names import PkiError, check_id

Row = dict[str, Any]
NameArgument = Annotated[str, typer.Argument(metavar="NODE|SERIAL")]


@contextmanager
def said() -> Iterator[None]:
    """What is wrong with files of the authority, in words and with exit status 1."""
    try:
        yield
    except PkiError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def node_token(
    context: typer.Context, node: str, ttl_s: float | None, labels: list[str], take_over: bool, output: Output
) -> None:
    body: Row = {"labels": _labels(labels), "replace": take_over}
    if ttl_s is not None:
        body["ttl_s"] = ttl_s
    with said():
        check_id(node)
    with admin(context) as client:
        answer = client.post(f"nodes/{node}/token", body)
    show(answer, output, _print_token)


def _labels(texts: list[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--label {text!r}: KEY=VALUE was expected, such as rack=a3")
        labels[name] = value
    return labels


def _print_token(answer: Row) -> None:
    """The token alone on stdout, so that it can be piped; the rest is for people."""
    takes = ", and takes the name from the machine that has it" if answer["replace"] else ""
    print(f"lets one machine join as {answer['node']} until {answer['expires_at']}{takes}; on it:", file=sys.stderr)
    print(f"  llmgw agent join --server {','.join(answer['addresses'])} --token-file -", file=sys.stderr)
    print(answer["token"])


def add_cluster_verbs(app: typer.Typer) -> None:
    @app.command("list")
    def list_command(
        context: typer.Context,
        node: Annotated[str | None, typer.Argument(help="Of this node alone.")] = None,
        every: Annotated[bool, typer.Option("--all", help="Also those that are not taken any more.")] = False,
        output: OutputOption = Output.TABLE,
    ) -> None:
        """The certificates that the control plane knows."""
        about = {"node": node} if node else {}
        with admin(context) as client:
            answer = client.get("certificates", **about)
        show(answer, output, lambda answer: _print_certificates(answer, every=every))

    @app.command("renew")
    def renew(context: typer.Context, node: str, output: OutputOption = Output.TABLE) -> None:
        """Have a node renew its certificate now, ahead of its time."""
        with admin(context) as client:
            answer = client.post(f"certificates/{node}/renew")
        show(answer, output, lambda answer: print(f"{answer['words']}\n`llmgw ctl cert list {node}` says when it has"))

    @app.command("revoke")
    def revoke(
        context: typer.Context,
        name: NameArgument,
        why: Annotated[str, typer.Option("--why", help="For people.")] = "revoked by an operator",
        output: OutputOption = Output.TABLE,
    ) -> None:
        """Let a node, or one certificate, in no more: its open stream is closed at once."""
        with admin(context) as client:
            answer = client.post(f"certificates/{name}/revoke", {"why": why})
        show(answer, output, _print_revoked)

    @app.command("rotate-ca")
    def rotate(
        context: typer.Context,
        dir: Annotated[Path, typer.Option("--dir", help="The authority's directory: ca.pem and ca-key.pem.")],
        finish: Annotated[bool, typer.Option("--finish", help="Drop the older authority.")] = False,
        unasked: Annotated[
            bool, typer.Option("--force", help="With --finish: without asking a control plane who would be locked out.")
        ] = False,
    ) -> None:
        """Have another authority take over: both are trusted until every node has moved, then the older is dropped."""
        if finish:
            _finish(context, dir, unasked)
        else:
            _begin(dir)


def show_known(context: typer.Context, name: str, output: Output) -> None:
    """What the control plane knows of a node's certificates, or of one serial."""
    with admin(context) as client:
        answer = client.get(f"certificates/{name}")
    show(answer, output, _print_details)


def _print_certificates(answer: list[Row], *, every: bool) -> None:
    out = console()
    shown = [each for each in answer if every or each["state"] in ("next", "current", "expired")]
    if not shown:
        out.print("no certificate is known" if not answer else "none that is taken; --all shows those that were")
        return
    columns = [
        Column("NODE"),
        Column("STATE"),
        Column("SOURCE", 1),
        Column("UNTIL"),
        Column("USED", 2),
        Column("SERIAL"),
    ]
    rows = [
        (
            each["node"] + ("" if each["role"] == "node" else f" ({each['role']})"),
            state_text(each["state"]),
            each["source"],
            (each["not_after"] or "?")[:16].replace("T", " "),
            f"{ago(each['first_used_at'])} ago" if each["first_used_at"] else "never",
            each["serial"],
            each["why"],
        )
        for each in shown
    ]
    print_rows(out, columns, "WHY", rows)


def _print_details(answer: list[Row]) -> None:
    out = console()
    for each in answer:
        fact(out, "", f"certificate {each['serial']} of {each['role']} {each['node']}: {each['state']}", indent=0)
        fact(out, "source", each["source"] + (f", after {each['previous']}" if each["previous"] else ""))
        fact(out, "valid", f"{each['issued_at']} to {each['not_after'] or 'a time that is not known'}")
        fact(out, "used", f"first on {each['first_used_at']}" if each["first_used_at"] else "never")
        fact(out, "issued by", f"key {each['issuer']}" if each["issuer"] else "not known")
        if each["ended_at"]:
            fact(out, "ended", f"{each['ended_at']}" + (f": {each['why']}" if each["why"] else ""))


def _print_revoked(answer: Row) -> None:
    out = console()
    out.print(answer["words"], soft_wrap=True)
    for serial in answer["serials"]:
        fact(out, "serial", serial)
    for replica in answer["replicas"]:
        why = f": {replica['why']}" if replica["why"] else ""
        fact(out, "replica", f"{replica['id']} ({replica['model']}) is {replica['state']}{why}")


def _begin(dir: Path) -> None:
    from llmgw.pki.issuer import ISSUER_FILES
    from llmgw.pki.rotation import begin

    with said():
        authority, issuer = begin(dir, issuer=(dir / ISSUER_FILES[0]).exists())
    typer.echo(f"{dir / 'ca.pem'} has two authorities now; everything is issued by the newer one, both are trusted")
    files = ", ".join(["ca.pem", *(ISSUER_FILES if issuer is not None else ())])
    typer.echo(f"where {dir} is not the control plane's own, copy {files} there; it takes them up by itself")
    if issuer is None:
        typer.echo(f"there is no issuing key in {dir}: every node's certificate is to be issued anew by hand")
    typer.echo(f"nodes move as they renew; then: llmgw ctl cert rotate-ca --finish --dir {dir}")
    assert len(authority.roots) > 1


def _finish(context: typer.Context, dir: Path, unasked: bool) -> None:
    from llmgw.pki.authority import Authority
    from llmgw.pki.certificate import facts_of
    from llmgw.pki.rotation import finish

    with said():
        newest = facts_of(Authority.load(dir).certificate).key_id
        if not unasked:
            _check_moved(context, newest)
        finish(dir)
    typer.echo(
        f"{dir / 'ca.pem'} has the newer authority alone; where {dir} is not the control plane's own, copy it there"
    )


def _check_moved(context: typer.Context, newest: str) -> None:
    with admin(context) as client:
        answer = client.get("authority")
    if answer["roots"][0]["key"] != newest or len(answer["roots"]) < 2:
        raise PkiError(
            f"the control plane does not trust the newer authority (key {newest}) yet, so that nothing can have moved: "
            "copy ca.pem to it, and the issuing key"
        )
    if answer["unmoved"]:
        named = "\n".join(f"  {node}: {why}" for node, why in answer["unmoved"].items())
        raise PkiError(
            f"{len(answer['unmoved'])} would be locked out, and nothing was changed:\n{named}\n"
            "`llmgw ctl cert renew NODE` has one renew now; one that is gone: `llmgw ctl node remove NODE`"
        )
    if answer["server_key"] != newest and answer["issuer"] is None:
        raise PkiError(
            "the control plane's own certificate is of the older authority, and it has no issuing key to renew it by: "
            "`llmgw ctl cert issue-server --force`, restart it, then finish"
        )
