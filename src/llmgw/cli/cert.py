"""``llmgw ctl cert``: the cluster's authority and its certificates. Needs no control plane."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from llmgw.cli.admin import Output, OutputOption
from llmgw.cli.cert_cluster import add_cluster_verbs, said, show_known
from llmgw.pki.authority import CLIENT_LIFETIME_S, Authority, Issued
from llmgw.pki.certificate import CertificateFacts, facts_of, in_words, read_certificate
from llmgw.pki.contexts import issuer_of
from llmgw.pki.issuer import ISSUER_FILES, Issuer, issue_issuer
from llmgw.pki.names import PkiError
from llmgw.pki.signing import DAY_S

app = typer.Typer(name="cert", help="The cluster's authority and its certificates.", no_args_is_help=True)

AuthorityDir = Annotated[Path, typer.Option("--dir", help="The authority's directory: ca.pem and ca-key.pem.")]
Out = Annotated[Path, typer.Option("--out", help="Where the files are written.")]
Force = Annotated[bool, typer.Option("--force", help="Renew: replace a certificate and key of the same name.")]


@app.command("init-ca")
def init_ca(
    dir: AuthorityDir,
    cluster: Annotated[str, typer.Option("--cluster", help="As `cluster:` in server.yaml; chosen once.")] = "llmgw",
    no_issuer: Annotated[
        bool, typer.Option("--no-issuer", help="Make no issuing key: every certificate is issued by hand.")
    ] = False,
) -> None:
    """Make the cluster's certificate authority, and an issuing key of it for the control plane."""
    with said():
        authority = Authority.create(dir, cluster)
        issuer = None if no_issuer else issue_issuer(authority, dir)
    typer.echo(
        f"wrote {dir / 'ca.pem'} and {dir / 'ca-key.pem'} (cluster {cluster!r}, until {_day(authority.not_after)})"
    )
    typer.echo(f"keep {dir / 'ca-key.pem'} secret: whoever reads it can be any node")
    if issuer is not None:
        _wrote_issuer(issuer)
    typer.echo(f"next: llmgw ctl cert issue-server --dir {dir} --san NAME-OR-ADDRESS --out /etc/llmgw/pki")


@app.command("issue-server")
def issue_server(
    dir: AuthorityDir,
    san: Annotated[list[str], typer.Option("--san", help="A host name or address that nodes dial; repeatable.")],
    name: Annotated[str | None, typer.Option("--name", help="The control plane's id [this machine's name].")] = None,
    out: Out = Path("."),
    lifetime: Annotated[str, typer.Option("--lifetime", help="Such as 2y, 365d or 24h.")] = "825d",
    force: Force = False,
) -> None:
    """Issue the certificate of a control plane, and of the gateway beside it."""
    with said():
        issued = Authority.load(dir).issue_server(san, out, name, lifetime_s=parse_lifetime(lifetime), renew=force)
    _wrote(issued, f"server {issued.common_name!r} at {', '.join(san)}")
    typer.echo(f"next: name the three files under `tls:` in server.yaml; llmgw ctl cert issue-client NODE --dir {dir}")


@app.command("issue-issuer")
def issue_issuer_command(
    dir: AuthorityDir,
    out: Annotated[Path | None, typer.Option("--out", help="Where the files are written [the same directory].")] = None,
    lifetime: Annotated[str, typer.Option("--lifetime", help="Such as 5y, 365d or 24h.")] = "5y",
    force: Annotated[bool, typer.Option("--force", help="Replace an issuing key that is there.")] = False,
) -> None:
    """Make an issuing key, by which a control plane lets nodes join and renew without the authority's own key."""
    with said():
        issuer = issue_issuer(Authority.load(dir), out or dir, parse_lifetime(lifetime), renew=force)
    _wrote_issuer(issuer)


@app.command("issue-client")
def issue_client(
    node: Annotated[str, typer.Argument(help="The node's id: its host name, unless its file says `node_id`.")],
    dir: AuthorityDir,
    out: Out = Path("."),
    lifetime: Annotated[str, typer.Option("--lifetime", help="Such as 1y, 365d or 24h.")] = "1y",
    force: Force = False,
) -> None:
    """Issue the certificate of a node."""
    with said():
        issued = Authority.load(dir).issue_client(node, out, parse_lifetime(lifetime), renew=force)
    _wrote(issued, f"node {issued.common_name!r}")
    typer.echo(f"next: copy the three files to {node}, and name them under `tls:` in its agent.yaml")


@app.command("show")
def show_command(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="A file, a certificate in PEM form; or a node or serial of the cluster.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what a certificate says, or what the control plane knows of a node's."""
    file = Path(what)
    if not file.exists() and "/" not in what and not what.endswith(".pem"):
        show_known(context, what, output)
        return
    with said():
        facts = facts_of(read_certificate(file, "the certificate"))
    for label, value in _rows(facts, datetime.now(UTC)):
        typer.echo(f"{label + ':':14}{value}")


def parse_lifetime(text: str) -> float:
    """Seconds in ``1y`` (365 days), ``90d``, ``24h`` or any duration of the configuration. Raises PkiError."""
    # Here, since every `ctl` command would wait for the configuration's half a second of imports otherwise.
    from llmgw.config.faults import Refused
    from llmgw.config.quantities import parse_duration

    years = re.fullmatch(r"([1-9][0-9]?)y", text)
    if years is not None:
        return int(years[1]) * CLIENT_LIFETIME_S
    try:
        return parse_duration(text)
    except Refused as error:
        raise PkiError(f"--lifetime {text!r}: such as 1y, 365d or 24h was expected") from error


def _rows(facts: CertificateFacts, now: datetime) -> Iterator[tuple[str, str]]:
    yield "name", facts.common_name
    yield "cluster", facts.cluster or "none: not made by llmgw"
    yield (
        "roles",
        "authority" if facts.is_authority else ", ".join(f"{uri.role} {uri.id}" for uri in facts.uris) or "none",
    )
    if facts.names:
        yield "valid for", ", ".join(facts.names)
    yield "key", facts.key_id
    yield "issued by", issuer_of(facts)
    yield "valid from", in_words(facts.not_before)
    yield "valid until", f"{in_words(facts.not_after)} ({_left(facts, now)})"
    yield "serial", facts.serial
    yield "SHA-256", facts.fingerprint


def _left(facts: CertificateFacts, now: datetime) -> str:
    if now < facts.not_before:
        return "not valid yet"
    days = (facts.not_after - now).total_seconds() / DAY_S
    if days <= 0:
        return "expired"
    return f"{days:.0f} days left" if days >= 2 else f"{days * 24:.0f} hours left"


def _wrote_issuer(issuer: Issuer) -> None:
    pem, key = (issuer.directory / name for name in ISSUER_FILES)
    typer.echo(f"wrote {pem} and {key} (issuing key of {issuer.cluster!r}, until {_day(issuer.not_after)})")
    typer.echo(f"they belong beside ca.pem on the control plane; {key} must be readable by it alone")


def _wrote(issued: Issued, whose: str) -> None:
    typer.echo(f"wrote {issued.cert}, {issued.key} and {issued.ca} ({whose}, until {_day(issued.not_after)})")


def _day(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d")


add_cluster_verbs(app)
