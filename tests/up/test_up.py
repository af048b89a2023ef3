"""`llmgw up` as a person uses it: started, asked, stopped, started again, and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from llmgw.process.detached import find
from llmgw.process.errors import ProcessError
from tests.cluster.lab import alive, eventually, free_port


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

    def up(self, *arguments: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "HOME": str(self.home)}
        env.pop("XDG_DATA_HOME", None)
        env.pop("XDG_CONFIG_HOME", None)
        with self.out.open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "up", *arguments],
                stdout=output,
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


@pytest.fixture
def person() -> Iterator[Person]:
    """A home of its own, closed to everybody else, as homes are."""
    someone = Person(Path(tempfile.mkdtemp(prefix="llmgw-home-")))
    try:
        yield someone
    finally:
        someone.close()


def ask(printed: dict[str, str], model: str = "default") -> str:
    with openai.OpenAI(base_url=printed["endpoint"], api_key=printed["key"], timeout=60) as client:
        messages = [{"role": "user", "content": "Hello"}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)


def test_up_ask_stop_and_up_again(person: Person) -> None:
    popen = person.up("--engine", "sim", "--port", str(free_port()))
    first = person.printed(popen)
    assert ask(first)
    done = subprocess.run(first["curl"], shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    context = {**os.environ, "HOME": str(person.home)}
    command = [sys.executable, "-m", "llmgw", "ctl", "models"]
    told = subprocess.run(command, env=context, capture_output=True, text=True, timeout=60, check=True)
    assert "1 of 1 replica ready" in told.stdout
    assert {oct(path.stat().st_mode & 0o777) for path in person.dir.rglob("*key*.pem")} == {"0o600"}
    assert oct(person.dir.stat().st_mode & 0o777) == "0o700"

    assert person.stop(popen) == 0
    assert "stopped; nothing is left running" in person.said()
    assert person.handles() == []

    again = person.up("--engine", "sim")
    second = person.printed(again)
    assert (second["endpoint"], second["key"]) == (first["endpoint"], first["key"])
    assert ask(second)
    assert person.stop(again) == 0
    assert person.handles() == []


def test_what_is_killed_is_started_again_and_engines_go_on(person: Person) -> None:
    popen = person.up("--engine", "sim", "--port", str(free_port()))
    printed = person.printed(popen)
    before = dict(person.handles())
    engine = [pid for pid in before.values() if "simulator" in Path(f"/proc/{pid}/cmdline").read_text()]
    for name in ("server", "agent"):
        pid = next(
            pid for _, pid in person.handles() if f"\0{name}\0--config" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not alive(pid), "it is dead")
        assert ask(printed)
        eventually(
            lambda name=name: any(
                f"\0{name}\0--config" in Path(f"/proc/{pid}/cmdline").read_text() for _, pid in person.handles()
            ),
            f"the {name} is started again",
        )
    assert "was killed by SIGKILL" in person.said()
    assert all(alive(pid) for pid in engine)


def test_an_up_that_was_killed_is_taken_up_again(person: Person) -> None:
    popen = person.up("--engine", "sim", "--port", str(free_port()))
    first = person.printed(popen)
    before = sorted(person.handles())
    popen.kill()
    popen.wait()
    assert ask(first)
    again = person.up("--engine", "sim")
    assert person.printed(again)["endpoint"] == first["endpoint"]
    assert sorted(person.handles()) == before
    assert person.stop(again) == 0
    assert person.handles() == []


def test_two_at_once(person: Person) -> None:
    popen = person.up("--engine", "sim", "--port", str(free_port()))
    printed = person.printed(popen)
    command = [sys.executable, "-m", "llmgw", "up", "--engine", "sim", "--dir", str(person.dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"`llmgw up` runs already on {person.dir}" in done.stderr
    assert ask(printed)


def refused(person: Person, *arguments: str) -> str:
    popen = person.up(*arguments)
    assert popen.wait(60) == 1, person.said()
    assert "Traceback" not in person.said()
    assert person.handles() == []
    return person.said()


def test_a_port_that_is_taken(person: Person) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(person, "--engine", "sim", "--port", str(port))
    assert f"port {port} (gateway) is taken by pid {os.getpid()}" in said
    assert "--port N chooses another" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "vllm"), "--engine vllm: `llmgw up` runs llamacpp or sim"),
        (("--model", "/nowhere.gguf"), "--model /nowhere.gguf: No such file or directory"),
        (("--model", "/etc/hostname"), "--model /etc/hostname is no GGUF file"),
        (("--model", "/etc/hostname", "--engine", "sim"), "exclude each other"),
    ],
)
def test_what_cannot_be_served(person: Person, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(person, *arguments)
    assert not (person.dir / "pki").exists()


def test_a_directory_that_cannot_be_made(person: Person) -> None:
    (person.home / "file").write_text("")
    said = refused(person, "--engine", "sim", "--dir", str(person.home / "file" / "below"))
    assert "can't be made: Not a directory; name another directory with --dir" in said


def test_a_file_that_was_edited_is_kept(person: Person) -> None:
    popen = person.up("--engine", "sim", "--port", str(free_port()))
    person.printed(popen)
    assert person.stop(popen) == 0
    file = person.dir / "server.yaml"
    edited = file.read_text() + "  - {name: mine, replicas: 0, profiles: [{engine: sim, memory: 8MiB}]}\n"
    file.write_text(edited)
    said = refused(person, "--engine", "sim")
    assert f"{file} was edited by hand, and the flags say what to serve" in said
    assert file.read_text() == edited
    popen = person.up()
    person.printed(popen)
    assert file.read_text() == edited
    assert ask(person.printed(popen), "sim")
    file.write_text(edited + "nonsense: 1\n")
    assert person.stop(popen) == 0
    assert "nonsense" in refused(person)
