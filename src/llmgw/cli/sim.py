"""``llmgw sim``: the simulated engine, stand-alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""For registering ``sim``: its flags, --help included, are read by the simulator itself, once for both ways in."""


def sim(arguments: Annotated[list[str] | None, typer.Argument(metavar="[FLAGS]", show_default=False)] = None) -> None:
    """Run the simulated engine: a real HTTP server that answers like an engine and computes nothing."""
    run(arguments or [])


def run(argv: Sequence[str]) -> None:
    from llmgw.simulator.__main__ import main

    sys.exit(main(argv))
