"""How every verb of ``llmgw ctl`` reaches the admin API, and shows what it answers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from llmgw.cli import tables
from llmgw.cli.rows import LEAST_ROOM, wrapped
from llmgw.client import AdminClient, AdminError, ContextError, find_context


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table, or the API's own JSON.")]


@dataclass(slots=True)
class Where:
    """The options before the verb: where the control plane is."""

    server: str | None = None
    token: str | None = None
    ca: str | None = None
    context: Path | None = None


@contextmanager
def admin(context: typer.Context) -> Iterator[AdminClient]:
    """The admin client; whatever keeps it from an answer is said in words, with exit status 1."""
    given: Where = context.obj
    try:
        with AdminClient(find_context(given.server, given.token, given.ca, given.context)) as client:
            yield client
    except (AdminError, ContextError) as error:
        complain(str(error))
        raise typer.Exit(1) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error} (on this machine)")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def complain(words: str) -> None:
    """To stderr; where that is a terminal, broken between words."""
    text = f"llmgw ctl: {words}"
    if sys.stderr.isatty():
        width = max(shutil.get_terminal_size().columns, LEAST_ROOM)
        text = "\n".join(part for line in text.splitlines() for part in wrapped(line, width, hang=True))
    print(text, file=sys.stderr)


def show(answer: Any, output: Output, table: Callable[[Any], None]) -> None:
    if output is Output.JSON:
        tables.print_json(answer)
    else:
        table(answer)
