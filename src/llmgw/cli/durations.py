"""Durations as options of a command."""

from __future__ import annotations

import typer


def duration(text: str) -> float:
    """A duration of an option, in seconds."""
    # Here, since every `ctl` command would wait for the configuration's imports otherwise.
    from llmgw.config.faults import Refused
    from llmgw.config.quantities import parse_duration

    try:
        return parse_duration(text)
    except Refused as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise typer.BadParameter(f"{text!r}: expected {error.expected}{hint}") from None
