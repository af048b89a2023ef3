"""``llmgw agent join|request|accept``: how a machine gets the certificate of a node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from llmgw.agent.joining import Joined

MAX_INPUT_BYTES = 1 << 20

Config = Annotated[Path, typer.Option("--config", "-c", help="The agent's file; it may not exist yet.")]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        "--work-dir", help="Where the agent keeps its state (left out: what its file says, or /var/lib/llmgw-agent)."
    ),
]
DEFAULT_CONFIG = Path("/etc/llmgw/agent.yaml")


def register(app: typer.Typer) -> None:
    app.command("join")(join)
    app.command("request")(request)
    app.command("accept")(accept)


def join(
    token: Annotated[str | None, typer.Option("--token", help="As `llmgw ctl node token NODE` printed it.")] = None,
    token_file: Annotated[
        str | None, typer.Option("--token-file", help="A file that holds the token; - is standard input.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", help="https://HOST:PORT[,…] of the control planes (left out: the token's)."),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    work_dir: WorkDir = None,
) -> None:
    """Make this machine a node, by a token. Its key is made here and never leaves it."""
    import asyncio

    from llmgw.agent.joining import JoinRefused, place_of
    from llmgw.agent.joining import join as join_by
    from llmgw.cli.processes import set_up_logging
    from llmgw.config import ConfigError
    from llmgw.pki.join_token import parse_join_token
    from llmgw.pki.names import PkiError

    set_up_logging()
    servers = [part.strip() for part in (server or "").split(",") if part.strip()]
    try:
        parsed = parse_join_token(_token(token, token_file))
        joined = asyncio.run(join_by(parsed, servers, place_of(config, work_dir)))
    except (JoinRefused, ConfigError, PkiError) as error:
        _refuse(error)
    _say(joined)
    if joined.wrote is not None:
        typer.echo(f"wrote {joined.wrote}")
    for note in joined.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"next: llmgw agent --config {config}; where it runs already it takes the certificate up by itself")


def request(
    node: Annotated[str, typer.Option("--node", help="The node's id: its host name, unless its file says `node_id`.")],
    config: Config = DEFAULT_CONFIG,
    work_dir: WorkDir = None,
) -> None:
    """Make a key here, and print the request that is signed where the authority is. `accept` takes the answer."""
    from llmgw.agent.joining import JoinRefused, place_of
    from llmgw.agent.joining import request as request_for
    from llmgw.config import ConfigError

    try:
        typer.echo(request_for(node, place_of(config, work_dir)), nl=False)
    except (JoinRefused, ConfigError) as error:
        _refuse(error)


def accept(config: Config = DEFAULT_CONFIG, work_dir: WorkDir = None) -> None:
    """Take the certificate for `request` from standard input: the node's, then the authority's (PEM)."""
    from llmgw.agent.joining import JoinRefused, place_of
    from llmgw.agent.joining import accept as accept_from
    from llmgw.config import ConfigError

    try:
        _say(accept_from(sys.stdin.read(MAX_INPUT_BYTES), place_of(config, work_dir)))
    except (JoinRefused, ConfigError) as error:
        _refuse(error)
    except UnicodeDecodeError:
        _refuse(Exception("what was given is not text: certificates in PEM form were expected"))


def _token(token: str | None, file: str | None) -> str:
    if (token is None) == (file is None):
        raise typer.BadParameter("give the token with one of the two", param_hint="--token / --token-file")
    if token is not None:
        return token
    if file == "-":
        return sys.stdin.read(MAX_INPUT_BYTES)
    try:
        return Path(str(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} can't be read: {error}", param_hint="--token-file") from error


def _say(joined: Joined) -> None:
    from llmgw.pki.certificate import in_words

    pair = joined.pair
    typer.echo(f"node {pair.node} has certificate {pair.serial}, until {in_words(pair.not_after)}")
    for path in joined.moved:
        typer.echo(f"what lay at {path.with_name(path.name.removesuffix('.replaced'))} is at {path} now")


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)
