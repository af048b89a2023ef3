"""Somebody who types `llmgw up`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.process.detached import find
from llmgw.process.errors import ProcessError
from tests.cluster.lab import alive, eventually


@dataclass
class Person:
    """Somebody's terminal: a home directory, and what runs in it."""

    home: Path
    popens: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def dir(self) -> Path:
        return self.home / ".local" / "share" / "llmgw"

    @property
    def out(self) -> Path:
        return self.home / "out"

    def up(self, *arguments: str, output: int | None = None) -> subprocess.Popen[bytes]:
        """Typed with these arguments; what it prints goes to ``out``, or to a descriptor."""
        env = {**os.environ, "HOME": str(self.home)}
        env.pop("XDG_DATA_HOME", None)
        env.pop("XDG_CONFIG_HOME", None)
        with self.out.open("wb") as file:
            popen = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "up", *arguments],
                stdout=file if output is None else output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        self.popens.append(popen)
        return popen

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def printed(self, popen: subprocess.Popen[bytes], within_s: float = 90.0) -> dict[str, str]:
        """Endpoint, key and the curl line, once they are printed."""

        def check() -> bool:
            assert popen.poll() is None, self.said()
            return "\ncurl " in self.said() and self.said().endswith("\n")

        eventually(check, "it is up", within_s)
        text = self.said()
        found = {name: re.search(rf"^  {name} +(\S+)$", text, re.M) for name in ("endpoint", "key")}
        curl = re.search(r"^curl .*$", text, re.M)
        assert curl
        return {**{name: match[1] for name, match in found.items() if match}, "curl": curl[0]}

    def handles(self) -> list[tuple[str, int]]:
        """Every process that was started and still runs."""
        found = []
        for record in self.dir.rglob("record.json"):
            try:
                handle = find(record.parent)
            except ProcessError:
                continue
            if handle is not None and handle.running():
                found.append((Path(handle.record.argv[0]).name, handle.pid))
        return found

    def stop(self, popen: subprocess.Popen[bytes], within_s: float = 60.0) -> int:
        popen.send_signal(signal.SIGINT)
        return popen.wait(within_s)

    def close(self) -> None:
        for popen in self.popens:
            if popen.poll() is None:
                popen.kill()
                popen.wait()
        for record in self.dir.rglob("record.json"):
            for who in ("reaper", "program"):
                pid = int(json.loads(record.read_text())[who]["pid"])
                if alive(pid) and "llmgw" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        for _, pid in self.handles():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)
