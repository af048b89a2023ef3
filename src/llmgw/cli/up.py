"""``llmgw up``: how a cluster of one looks to whoever started it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmgw.client import ContextError, default_context_path, find_context, write_context
from llmgw.config import ConfigError
from llmgw.pki.names import PkiError
from llmgw.up.layout import Home, Serve, UpRefused
from llmgw.up.run import ClusterOfOne, Progress, Up, only_one

T = TypeVar("T")

WIDE = 110
"""From this many columns on there is room for a bar beside the words, which say the percentage anyway."""


def run_up(directory: Path | None, engine: str | None, model: Path | None, port: int | None) -> int:
    """Returns the exit status. None everywhere: the default directory, model and port."""
    home = Home((directory or default_dir()).expanduser().absolute())
    serve = Serve(engine=engine or "llamacpp", model=model.expanduser().absolute() if model else None)
    asked = engine is not None or model is not None
    return asyncio.run(_up(home, serve, port, asked, default_context_path()))


def default_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "llmgw"


class Signals:
    """Ctrl-C and SIGTERM, counted: the first asks for an orderly end, the second for one at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def until(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns; None where the event came first, and ``work`` was cancelled."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, waiter):
            each.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


async def _up(home: Home, serve: Serve, port: int | None, asked: bool, context_path: Path) -> int:
    view = View(Terminal(highlight=False))
    try:
        with only_one(home):
            return await _cluster(ClusterOfOne(home, serve, port, asked, view.progress()), view, context_path)
    except (UpRefused, ConfigError, PkiError) as refusal:
        view.close()
        print(f"llmgw up: {refusal}", file=sys.stderr)
        return 1


async def _cluster(cluster: ClusterOfOne, view: View, context_path: Path) -> int:
    signals = Signals()
    began = time.monotonic()
    try:
        found = await until(signals.first, cluster.up())
    except (UpRefused, ConfigError, PkiError):
        await cluster.take_back()
        raise
    view.close()
    if found is not None:
        with heard():
            _print_found(view.out, found, time.monotonic() - began, _keep_context(found, context_path))
        await until(signals.first, cluster.watch())
    view.print("\nstopping: engines first (Ctrl-C again ends at once)")
    await until(signals.second, cluster.down())
    view.close()
    if signals.second.is_set():
        await cluster.end_processes()
        left = await asyncio.to_thread(cluster.engines_left)
        view.print("left running: " + ", ".join(left) if left else "ended; nothing is left running")
        return 130
    left = await asyncio.to_thread(cluster.engines_left)
    view.print("stopped, but left running: " + ", ".join(left) if left else "stopped; nothing is left running")
    return 1 if left else 0


def _keep_context(found: Up, path: Path) -> str:
    """Lets ``llmgw ctl`` find this cluster by itself, unless it is set up for another. Returns what to type."""
    mine = find_context(path=found.home.context, env={})
    try:
        theirs = path.exists() and find_context(path=path, env={}).server != mine.server
    except ContextError:
        theirs = True
    me = "llmgw" if shutil.which("llmgw") else sys.argv[0] if os.access(sys.argv[0], os.X_OK) else "python -m llmgw"
    if theirs:
        return f"{me} ctl --context {found.home.context} status"
    write_context(mine, path)
    return f"{me} ctl status"


def _print_found(out: Console, found: Up, took_s: float, ctl: str) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea in one sentence."}]
    body = {"model": found.models[0], "messages": messages, "max_tokens": 64}
    curl = (
        f"curl {found.endpoint}/chat/completions -H 'Authorization: Bearer {found.key}' "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
    out.print(f"\nllmgw is up ({took_s:.0f} s). Ctrl-C stops it, engines included.\n")
    out.print(f"  endpoint  {found.endpoint}")
    out.print(f"  key       {found.key}")
    out.print(f"  model     {', '.join(found.models)}")
    out.print(f"  operate   {ctl}\n")
    # Printed as it is, on one line however wide the terminal: it is there to be copied.
    print(curl, flush=True)


@contextmanager
def heard() -> Iterator[None]:
    """A terminal that was closed, or a pipe whose reader has gone, must not keep anything from being stopped: from
    then on what is printed goes nowhere, what is left in buffers included."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Terminal(Console):
    """rich ends the process when a pipe breaks; here it is heard of like any other failure to print."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class View:
    """Progress: drawn in place on a terminal, a line for each change elsewhere."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self._live: Live | None = None
        self._said: dict[str, str] = {}

    def progress(self) -> Progress:
        return Progress(tell=self._tell, say=self._say)

    def close(self) -> None:
        if self._live is not None:
            with heard():
                self._live.update("", refresh=True)
                self._live.stop()
            self._live = None

    def print(self, words: str) -> None:
        with heard():
            self.out.print(words)

    def _tell(self, rows: list[tuple[str, str]]) -> None:
        with heard():
            self._draw(rows)

    def _draw(self, rows: list[tuple[str, str]]) -> None:
        if not self.out.is_terminal:
            for what, words in rows:
                # A percentage that moves is no news for a log.
                if self._said.get(what) != (settled := re.sub(r"\d+ %", "", words)):
                    self._said[what] = settled
                    print(f"{what}: {words}", flush=True)
            return
        if self._live is None:
            self._live = Live(console=self.out, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_drawn(rows, wide=self.out.width >= WIDE), refresh=True)

    def _say(self, words: str) -> None:
        with heard():
            if self.out.is_terminal:
                self.out.print(Text(words, style="yellow"))
            else:
                print(words, flush=True)


def _drawn(rows: list[tuple[str, str]], *, wide: bool) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)
    if wide:
        table.add_column(width=24)
    for what, words in rows:
        percent = re.search(r"(\d+) %", words)
        bar = ProgressBar(total=100, completed=int(percent[1])) if percent else ""
        table.add_row(*((what, words, bar) if wide else (what, words)))
    return table
