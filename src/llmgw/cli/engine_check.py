"""``llmgw ctl engine-check``: does this build of an engine still have every flag that llmgw can pass to it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmgw.cli.admin import Output, OutputOption


def engine_check(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="llamacpp, vllm or sglang.")],
    bin: Annotated[
        Path | None, typer.Option("--bin", help="The engine's program; for sglang its Python, or `sglang`.")
    ] = None,
    help_output: Annotated[
        str | None,
        typer.Option("--help-output", help="The help itself, up to 128 KiB (vLLM's is longer). Nothing is run."),
    ] = None,
    help_file: Annotated[
        Path | None, typer.Option("--help-file", help="A file that has the help; - is stdin. Nothing is run.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The agent's file, in place of /etc/llmgw/agent.yaml.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Does an engine still have every flag that llmgw can pass to it? Exit status: 0 yes, 1 no, 2 not known.

    Looked at is the engine that the agent's file names, else the one that is installed, else the one on PATH.
    """
    # It needs the agent's rooms, which no other verb does, and which take long to import.
    from llmgw.cli.engine_report import run_check

    try:
        status = run_check(
            engine,
            bin=bin,
            help_output=help_output,
            help_file=help_file,
            config=config,
            as_json=output is Output.JSON,
        )
    except KeyboardInterrupt:
        status = 130
    raise typer.Exit(status)
