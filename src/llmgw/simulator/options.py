"""The simulated engine's command line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmgw.engines.sim import KEY_VARIABLE, RENDEZVOUS_VARIABLE
from llmgw.simulator.faults import BadFault, Fault, parse_scoped
from llmgw.simulator.rendezvous import split_address
from llmgw.version import VERSION

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str = "127.0.0.1"
    port: int = 8080
    """0: any free port; the line that says where it listens names it."""
    model: str = "sim"
    aliases: tuple[str, ...] = ()
    load_time_s: float = 0.0
    first_token_s: float = 0.0
    token_interval_s: float = 0.0
    context: int | None = None
    """Tokens per request; longer ones are refused. None: no limit."""
    parallel: int | None = None
    """Requests worked on at once; others wait. None: no limit."""
    fault: Fault | None = None
    """None too where the fault that was given is for another rank."""
    api_key: str = ""
    """Asked of every request where it is not empty."""
    rank: int = 0
    nodes: int = 1
    dist_init: str | None = None
    """HOST:PORT where rank 0 listens for the others; set exactly where there are several nodes."""
    start_timeout_s: float = START_TIMEOUT_S
    """How long ranks wait for each other."""
    rendezvous_key: str = ""
    """What the ranks of one generation share, and nobody else has."""


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Reads a command line. Ends the process with status 2 and words on stderr where it can't be."""
    parser = _parser()
    given = parser.parse_args(argv)
    if words := _contradiction(given):
        parser.error(words)
    fault, rank = given.fault or (None, None)
    return Options(
        host=given.host,
        port=given.port,
        model=given.model,
        aliases=tuple(given.alias),
        load_time_s=given.load_time,
        first_token_s=given.first_token,
        token_interval_s=given.token_interval,
        context=given.context,
        parallel=given.parallel,
        fault=fault if rank in (None, given.rank) else None,
        api_key=environment.get(KEY_VARIABLE, ""),
        rank=given.rank,
        nodes=given.nodes,
        dist_init=given.dist_init,
        start_timeout_s=given.start_timeout,
        rendezvous_key=environment.get(RENDEZVOUS_VARIABLE, ""),
    )


def _contradiction(given: argparse.Namespace) -> str | None:
    of = f"ranks of {given.nodes} node{'s' if given.nodes > 1 else ''} go from 0 to {given.nodes - 1}"
    if given.rank >= given.nodes:
        return f"--rank {given.rank}: {of}"
    if given.fault is not None and (given.fault[1] or 0) >= given.nodes:
        return f"--fault {given.fault[0]}@{given.fault[1]}: {of}"
    if given.nodes > 1 and given.dist_init is None:
        return f"--nodes {given.nodes} needs --dist-init HOST:PORT, the address where rank 0 listens for the others"
    if given.nodes == 1 and given.dist_init is not None:
        return f"--dist-init {given.dist_init} is where several nodes meet: give --nodes too"
    if given.rank > 0 and given.dist_init.endswith(":0"):
        return f"--dist-init {given.dist_init}: only rank 0 can take any free port; give the one that it says"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmgw sim",
        description="A simulated engine: a real HTTP server that answers like an engine and computes nothing.",
        epilog=f"The key that requests must carry is read from {KEY_VARIABLE}; without one, none is asked for. "
        f"The ranks of one replica know each other by {RENDEZVOUS_VARIABLE}, which must be the same for all of them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"llmgw-sim {VERSION}")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8080, help="port to listen on, 0 for any (default: %(default)s)")
    add("--model", default="sim", metavar="NAME", help="name under which it serves (default: %(default)s)")
    add("--alias", action="append", default=[], metavar="NAME", help="further name; may be repeated")
    add("--load-time", type=_seconds, default=0.0, metavar="SECONDS", help="how long it says that it is loading")
    add("--first-token", type=_seconds, default=0.0, metavar="SECONDS", help="time to the first token")
    add("--token-interval", type=_seconds, default=0.0, metavar="SECONDS", help="time from token to token")
    add("--context", type=_positive, metavar="TOKENS", help="tokens per request; longer requests are refused")
    add("--parallel", type=_positive, metavar="N", help="requests worked on at once; others wait")
    add("--rank", type=_natural, default=0, metavar="N", help="rank of this process in its replica")
    add("--nodes", type=_positive, default=1, metavar="N", help="ranks of the replica, one per node (default: 1)")
    add("--dist-init", type=_address, metavar="HOST:PORT", help="where rank 0 listens for the others")
    add("--start-timeout", type=_seconds, default=START_TIMEOUT_S, metavar="SECONDS",
        help="how long ranks wait for each other (default: %(default)g)")  # fmt: skip
    add("--fault", type=_fault, metavar="KIND[:ARG][@RANK]", help="misbehave, or only RANK is to: "
        "exit-at-start[:STATUS], hang-in-rendezvous, hang, slow-tokens:SECONDS, die-after:TOKENS, die:SIGNAL, "
        "fork[:PATH], health-500")  # fmt: skip
    return parser


def _fault(text: str) -> tuple[Fault, int | None]:
    try:
        return parse_scoped(text)
    except BadFault as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> str:
    try:
        split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, such as 0.5")
    return seconds


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, from 0")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, from 1")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 0 to 65535")
    return int(text)
