"""What an operator types, over a real cluster: answers, refusals and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.cluster.lab import SIM, Lab, eventually
from tests.cluster.streams import ask


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    """One cluster for all tests here; each leaves it as it found it."""
    lab = Lab.make(extra="gateway: {hold_for: 2s}\n")
    try:
        lab.server()
        lab.agent("n1")
        lab.ready()
        yield lab
    finally:
        lab.close()


def ctl(lab: Lab, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    context = lab.context()
    env = {**os.environ, "LLMGW_SERVER": context.server, "LLMGW_TOKEN": token or context.token, "COLUMNS": "200"}
    command = [sys.executable, "-m", "llmgw", "ctl", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def said(lab: Lab, *arguments: str) -> str:
    done = ctl(lab, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("status",), "1 of 1 ready"),
        (("nodes",), "sim 0."),
        (("node", "n1"), "machine "),
        (("node", "show", "n1"), "machine "),
        (("models",), "1 of 1 replica ready"),
        (("replicas",), "ready on n1"),
        (("engines",), "built in"),
        (("events",), "node.registered"),
        (("why", "sim"), "ready on n1"),
        (("why", "default"), "ready on n1"),
    ],
)
def test_tables(shared: Lab, arguments: tuple[str, ...], words: str) -> None:
    assert words in said(shared, *arguments)


@pytest.mark.parametrize(
    "noun", ["status", "nodes", "node n1", "models", "replicas", "engines", "events", "why sim", "key list"]
)
def test_json_is_what_the_api_answers(shared: Lab, noun: str) -> None:
    assert json.loads(said(shared, *noun.split(), "-o", "json")) is not None


def test_replica_story_and_logs(shared: Lab) -> None:
    name = shared.replica()["id"]
    story = said(shared, "replica", "show", name)
    assert re.search(r"unplaced.*placing.*starting.*ready", story, re.DOTALL)
    assert "listening on" in said(shared, "logs", name)


def test_logs_follow_until_left(shared: Lab) -> None:
    context = shared.context()
    env = {**os.environ, "LLMGW_SERVER": context.server, "LLMGW_TOKEN": context.token}
    command = [sys.executable, "-u", "-m", "llmgw", "ctl", "logs", shared.replica()["id"], "-f"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert "listening on" in following.stdout.readline()
        assert following.poll() is None
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("node", "nobody"), "no node is called 'nobody'\nknown: n1"),
        (("why", "nothing"), "no model is called 'nothing'\nknown: sim"),
        (("replica", "show", "sim-aaaaa"), "no replica is called 'sim-aaaaa'"),
        (("logs", "sim-aaaaa"), "no shard is called 'sim-aaaaa/0'"),
        (("scale", "nothing", "2"), "no model is called 'nothing'"),
        (("key", "revoke", "key-none"), "no key is called 'key-none'"),
    ],
)
def test_a_name_that_nobody_has(shared: Lab, arguments: tuple[str, ...], words: str) -> None:
    done = ctl(shared, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


def test_the_wrong_token(shared: Lab) -> None:
    done = ctl(shared, "status", token="guessed")
    assert done.returncode == 1
    assert "that admin token is not this control plane's" in done.stderr


@pytest.mark.parametrize("path", ["status", "nodes", "keys", "backup", "events"])
def test_nothing_is_answered_without_a_token(shared: Lab, path: str) -> None:
    answer = httpx2.get(f"{shared.context().server}/api/v1/{path}")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "no_token"


def test_nobody_there() -> None:
    env = {**os.environ, "LLMGW_SERVER": "http://127.0.0.1:9", "LLMGW_TOKEN": "x"}
    command = [sys.executable, "-m", "llmgw", "ctl", "status"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "http://127.0.0.1:9 can't be reached" in done.stderr
    assert "is the control plane running there?" in done.stderr


def test_no_context(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "llmgw", "ctl", "status"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "give --server and --token" in done.stderr


def test_keys_are_made_used_and_revoked(shared: Lab) -> None:
    key = said(shared, "key", "create", "alice", "--model", "sim").strip()
    assert key.startswith("sk-")
    eventually(lambda: ask(shared, key).status_code == 200, "the key is taken")
    listed = json.loads(said(shared, "key", "list", "-o", "json"))
    assert key not in json.dumps(listed)
    mine = next(each for each in listed if each["name"] == "alice")
    said(shared, "key", "revoke", mine["id"])
    eventually(lambda: ask(shared, key).status_code == 401, "the key is refused")
    assert key not in (shared.root / "state" / "llmgw.db").read_bytes().decode("latin-1")


def test_scale_and_back(shared: Lab) -> None:
    assert "0/0" in said(shared, "scale", "sim", "0")
    eventually(lambda: not shared.get("replicas"), "the replica is gone")
    assert not shared.get("nodes")[0]["shards"]
    key = shared.key()
    answer = ask(shared, key, timeout_s=30)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "sim" in answer.json()["error"]["message"]
    assert "(file: 1)" in said(shared, "models")
    said(shared, "scale", "sim", "--reset")
    shared.ready()


def test_reload_takes_up_and_refuses(shared: Lab) -> None:
    sound = shared.server_file.read_text()
    second = SIM + "  - name: other\n    replicas: 0\n    profiles: [{engine: sim, memory: 8MiB}]\n"
    shared.write_server(second)
    assert "model other added" in said(shared, "reload")
    assert "other" in said(shared, "models")

    shared.write_server(second.replace("engine: sim", "engin: sim"))
    done = ctl(shared, "reload")
    assert done.returncode == 1
    assert "engin" in done.stderr
    assert "did you mean" in done.stderr.lower() or "engine" in done.stderr
    assert "other" in said(shared, "models")
    assert shared.events("config.refused")

    shared.server_file.write_text(sound.replace("cluster: lab", "cluster: elsewhere"))
    done = ctl(shared, "reload")
    assert done.returncode == 1
    assert "a change of cluster needs a restart" in done.stderr

    shared.server_file.write_text(sound)
    assert "model other removed" in said(shared, "reload")
    assert shared.replica()["restarts"] == 0


def test_sighup_reloads(shared: Lab) -> None:
    sound = shared.server_file.read_text()
    shared.write_server(SIM + "  - name: third\n    replicas: 0\n    profiles: [{engine: sim, memory: 8MiB}]\n")
    server = next(proc for proc in shared.procs if proc.name == "server")
    server.popen.send_signal(signal.SIGHUP)
    eventually(lambda: "third" in said(shared, "models"), "the file is taken up")
    shared.server_file.write_text(sound)
    server.popen.send_signal(signal.SIGHUP)
    eventually(lambda: "third" not in said(shared, "models"), "and again")


def test_backup_is_a_whole_store(shared: Lab, tmp_path: Path) -> None:
    file = tmp_path / "saved.db"
    assert "bytes" in said(shared, "backup", str(file))
    with sqlite3.connect(file) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    db.close()
    assert file.stat().st_mode & 0o777 == 0o600
    done = ctl(shared, "backup", str(file))
    assert done.returncode == 1
    assert "exists already" in done.stderr


def test_events_wait_for_what_comes(shared: Lab) -> None:
    last = shared.events()[-1]["id"]
    assert shared.get("events", after=last, wait_s=0) == []
    shared.key("later")
    found = shared.get("events", after=last, wait_s=20)
    assert [event["kind"] for event in found] == ["key.created"]


def test_openapi_describes_it(shared: Lab) -> None:
    document = httpx2.get(f"{shared.context().server}/openapi.json").json()
    assert "/api/v1/models/{name}/why" in document["paths"]


def test_metrics_of_both(shared: Lab) -> None:
    control = httpx2.get(f"{shared.context().server}/metrics").text
    assert 'llmgw_nodes{state="ready"} 1.0' in control
    gateway = httpx2.get(f"http://127.0.0.1:{shared.ports['metrics']}/metrics").text
    assert "llmgw_gateway" in gateway


def test_a_second_control_plane_on_one_store_is_refused(shared: Lab) -> None:
    other = shared.run("second", "server", "--config", str(shared.server_file))
    assert other.popen.wait(40) == 1
    assert "state" in other.output()
    assert "Traceback" not in other.output()
    assert shared.get("status")["models_ready"] == 1


def test_an_admin_token_that_is_lost_is_made_again(lab: Lab) -> None:
    server = lab.server()
    file = lab.root / "state" / "admin-token"
    first = file.read_text().strip()
    file.unlink()
    assert server.terminate() == 0
    again = lab.run("server", "server", "--config", str(lab.server_file), "--new-admin-token")
    eventually(file.exists, "it is written")
    eventually(lambda: lab._answers(again), "the control plane answers")
    assert file.read_text().strip() != first
    assert ctl(lab, "status", token=first).returncode == 1
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_admin_api_speaks_tls_away_from_loopback(lab: Lab) -> None:
    text = lab.server_file.read_text().replace(
        f"admin: 127.0.0.1:{lab.ports['admin']}", f"admin: 0.0.0.0:{lab.ports['admin']}"
    )
    lab.server_file.write_text(text)
    lab.run("server", "server", "--config", str(lab.server_file))
    token = lab.root / "state" / "admin-token"
    eventually(token.exists, "the token is written")
    env = {"LLMGW_SERVER": f"https://127.0.0.1:{lab.ports['admin']}", "LLMGW_CA": str(lab.root / "pki" / "ca.pem")}
    command = [sys.executable, "-m", "llmgw", "ctl", "status"]
    env = {**os.environ, **env, "LLMGW_TOKEN": token.read_text().strip()}

    def answered() -> bool:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode == 0 and "cluster   lab" in done.stdout

    eventually(answered, "it answers over TLS")
    with pytest.raises(httpx2.TransportError):
        httpx2.get(f"http://127.0.0.1:{lab.ports['admin']}/healthz")
