"""Ways in which the simulated engine misbehaves on request."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    EXIT_AT_START = "exit-at-start"
    """``exit-at-start[:STATUS]``: ends with STATUS (1) before it listens."""
    HANG_IN_RENDEZVOUS = "hang-in-rendezvous"
    """``hang-in-rendezvous``: takes and makes connections, and never gets to the other ranks' first word."""
    HANG = "hang"
    """``hang``: /health says 200, and no request is ever answered. A rank above 0 takes no part in any token."""
    SLOW_TOKENS = "slow-tokens"
    """``slow-tokens:SECONDS``: every token takes this long, whatever was asked for."""
    DIE_AFTER = "die-after"
    """``die-after:N``: kills itself with SIGKILL after N more tokens."""
    DIE = "die"
    """``die:SIGNAL``: kills itself with SIGNAL, once loaded."""
    FORK = "fork"
    """``fork[:PATH]``: leaves two processes behind that have moved into sessions of their own. They hold a shared lock
    (flock) on PATH, as what outlives an engine holds GPU memory: it is free again once it can be locked exclusively."""
    HEALTH_500 = "health-500"
    """``health-500``: /health answers 500; requests work."""


class BadFault(ValueError):
    """A fault that can't be read or can't be had; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    number: float = 0.0
    """STATUS, SECONDS, N or the signal's number, by kind."""
    path: str = ""

    def __str__(self) -> str:
        return self.kind.value


def parse_fault(text: str) -> Fault:
    """Reads ``KIND[:ARG]``. Raises BadFault."""
    name, colon, argument = text.partition(":")
    try:
        kind = FaultKind(name)
    except ValueError:
        raise BadFault(f"{name!r} is no fault: expected one of {', '.join(FaultKind)}") from None
    match kind:
        case FaultKind.EXIT_AT_START:
            return Fault(kind, _whole(text, argument, "a status from 0 to 255", 0, 255) if colon else 1)
        case FaultKind.SLOW_TOKENS:
            return Fault(kind, _seconds(text, argument))
        case FaultKind.DIE_AFTER:
            return Fault(kind, _whole(text, argument, "a number of tokens, from 0", 0, None))
        case FaultKind.DIE:
            return Fault(kind, _signal(text, argument))
        case FaultKind.FORK:
            if colon and not argument:
                raise BadFault(f"{text!r}: expected a path after the colon, or no colon")
            return Fault(kind, path=argument)
        case _ if colon:
            raise BadFault(f"{text!r}: {kind} takes no argument")
        case _:
            return Fault(kind)


SERVING = (FaultKind.HEALTH_500,)
"""Faults of the rank that serves."""


def parse_scoped(text: str) -> tuple[Fault, int | None]:
    """Reads ``KIND[:ARG][@RANK]``: the fault, and the only rank that it is for; None: it is for whoever reads it."""
    whole, at, rank = text.rpartition("@")
    if at and rank.isascii() and rank.isdigit():
        return _fitting(parse_fault(whole), int(rank)), int(rank)
    return parse_fault(text), None


def _fitting(fault: Fault, rank: int) -> Fault:
    if rank > 0 and fault.kind in SERVING:
        raise BadFault(f"{fault.kind} is rank 0's alone: rank {rank} has no port, and so no /health")
    return fault


def parse_late(text: str, rank: int) -> Fault:
    """Reads a fault for a rank that runs already."""
    fault = _fitting(parse_fault(text), rank)
    if fault.kind is FaultKind.HANG_IN_RENDEZVOUS:
        raise BadFault(f"{fault.kind} is for the start: the ranks have met already")
    return fault


def _whole(text: str, argument: str, expected: str, least: int, most: int | None) -> int:
    if argument.isascii() and argument.isdigit():
        number = int(argument)
        if number >= least and (most is None or number <= most):
            return number
    raise BadFault(f"{text!r}: expected {expected} after the colon")


def _seconds(text: str, argument: str) -> float:
    try:
        seconds = float(argument)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise BadFault(f"{text!r}: expected seconds after the colon, such as 0.5")
    return seconds


def _signal(text: str, argument: str) -> int:
    try:
        return signal.Signals[argument if argument.startswith("SIG") else f"SIG{argument}"]
    except KeyError:
        raise BadFault(f"{text!r}: expected a signal after the colon, such as SIGSEGV") from None
