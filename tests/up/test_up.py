"""`llmgw up` as a person uses it: started, asked, stopped, started again, and refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.cluster.lab import alive, eventually, free_port
from tests.up.person import Person


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


@pytest.mark.parametrize("terminal", [True, False])
def test_it_stops_though_nobody_can_read_what_it_says(person: Person, terminal: bool) -> None:
    """A terminal that was closed, or a pipe whose reader went first."""
    reads, writes = os.openpty() if terminal else os.pipe()
    popen = person.up("--engine", "sim", "--port", str(free_port()), output=writes)
    os.close(writes)
    said = b""
    while b"ctl status" not in said or b"curl" not in said:
        said += os.read(reads, 65536)
    os.close(reads)
    popen.send_signal(signal.SIGHUP if terminal else signal.SIGINT)
    assert popen.wait(60) == 0
    assert person.handles() == []
