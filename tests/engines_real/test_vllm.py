"""The real vLLM on processors: installed by agents, served, drained, upgraded, stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import alive
from tests.cluster.streams import Stream, ask, run_stream, start_streams
from tests.engines_real.cluster import MODEL, RealLab, eventually
from tests.engines_real.figures import Figures, descendants, megabytes, resident_megabytes

pytestmark = pytest.mark.timeout(3000)

INSTALL_S = 1500.0
TOKEN_A = "67"
"""Of the tiny model's vocabulary: the letter a."""
START_S = 900.0

MODELS = f"""\
models:
  - name: tiny
    source: {MODEL}
    profiles:
      - engine: vllm
        memory: 5GiB
        context: 2048
        parallel: 4
        args: ["--dtype", "float32", "--enforce-eager", "--load-format", "dummy"]
"""


def engines(version: str) -> str:
    return f"{{vllm: {{version: {version}}}}}"


def test_from_nothing_to_an_upgrade_without_a_lost_request(
    build: Callable[[str, str], RealLab], engines_dir: Path, figures: Figures
) -> None:
    lab = build(MODELS, engines("0.31.0"))
    lab.server()
    began = time.monotonic()
    lab.agent("node01")
    said = lab.installed("node01", "vllm", "0.31.0", INSTALL_S)
    figures.add("vLLM 0.31.0 installed and proved by an agent", f"{time.monotonic() - began:.1f} s")
    print(*said, sep="\n")
    figures.add("its environment and uv's cache", f"{megabytes(engines_dir)} MB")

    began = time.monotonic()
    first = lab.ready("tiny", START_S)
    figures.add("from there to ready, the one token included", f"{time.monotonic() - began:.1f} s")
    figures.add("resident memory of its processes", f"{resident_megabytes(first['pids'][0])} MB")
    key = lab.key()
    answer = ask(lab, key, model="tiny")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    eventually(lambda: lab.replica("tiny")["load"], "it tells how busy it is", 60)

    # Another node, and the first is drained while streams are open on it: they go on to their ends.
    lab.agent("node02")
    lab.installed("node02", "vllm", "0.31.0", INSTALL_S)
    streams = Streams(lab, key)
    with figures.timed("a drain under open streams, replacement first"), lab.admin() as client:
        client.post("nodes/node01/drain", {})
        eventually(lambda: _gone(lab, first), "the original has stopped", START_S)
    streams.stop()
    assert streams.broken == []
    figures.add("streams meanwhile, none cut off", str(streams.whole))
    assert not alive(first["pids"][0])
    with lab.admin() as client:
        client.delete("nodes/node01/drain")

    # And the next version, under steady requests.
    second = lab.ready("tiny")
    load = Steady(lab, key)
    began = time.monotonic()
    lab.write(MODELS, engines("0.32.0"))
    lab.reload()
    lab.installed("node02", "vllm", "0.32.0", INSTALL_S)
    figures.add("vLLM 0.32.0 installed beside it, under requests", f"{time.monotonic() - began:.1f} s")
    eventually(lambda: _gone(lab, second), "the old version has stopped", START_S)
    third = lab.ready("tiny")
    figures.add("the upgrade of one replica, its installation included", f"{time.monotonic() - began:.1f} s")
    load.stop()
    assert load.failed == [], load.failed[:3]
    figures.add("requests meanwhile, none failed", str(load.answered))
    figures.add("both environments and uv's cache", f"{megabytes(engines_dir)} MB")
    node = third["placements"][0]["node"]
    assert lab.engine(node, "vllm", "0.32.0")["state"] == "installed"
    assert lab.engine(node, "vllm", "0.31.0")["state"] == "installed", "the one before is kept"


def test_stopped_in_the_midst_of_a_stream_it_leaves_nothing(build: Callable[[str, str], RealLab]) -> None:
    """vLLM hangs on SIGTERM while a stream is open, and when it is killed, what it has started lives on."""
    lab = build(MODELS, engines("0.32.0"))
    lab.server_file.write_text(f"drain: {{in_flight: 2s}}\n{lab.server_file.read_text()}")
    lab.server()
    lab.agent("node01")
    lab.installed("node01", "vllm", "0.32.0", INSTALL_S)
    replica = lab.ready("tiny", START_S)
    family = descendants(replica["pids"][0])
    assert len(family) >= 3, "its server, its engine and its worker"
    # Of random weights most tokens are no text, and what is not text yet is not streamed.
    (stream,) = start_streams(lab, lab.key(), 1, 2000, "tiny", logit_bias={TOKEN_A: 100})
    with lab.admin() as client:
        client.put("models/tiny/scale", {"replicas": 0})
    eventually(lambda: not any(alive(pid) for pid in family), "all of its processes are gone", 60)
    stream.join(30)
    assert not stream.done
    eventually(lambda: _gone(lab, replica), "the replica is gone", 30)


def _gone(lab: RealLab, replica: dict[str, Any]) -> bool:
    return all(found["id"] != replica["id"] for found in lab.get("replicas"))


class Load:
    """Two clients that ask again as soon as they are answered."""

    def __init__(self, lab: RealLab, key: str) -> None:
        self._lab, self._key = lab, key
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            self._once()

    def _once(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a request hangs"


class Steady(Load):
    """Short requests."""

    def __init__(self, lab: RealLab, key: str) -> None:
        self.answered = 0
        self.failed: list[str] = []
        super().__init__(lab, key)

    def _once(self) -> None:
        answer = ask(self._lab, self._key, timeout_s=120, model="tiny")
        if answer.status_code == 200:
            self.answered += 1
        else:
            self.failed.append(f"{answer.status_code} {answer.text}")


class Streams(Load):
    """Long streams: there is always one that is open."""

    def __init__(self, lab: RealLab, key: str) -> None:
        self.whole = 0
        self.broken: list[str] = []
        super().__init__(lab, key)

    def _once(self) -> None:
        stream = Stream()
        run_stream(stream, self._lab.endpoint, self._key, 1800, "tiny")
        # Tokens that are half of a character come with no text of their own.
        if stream.done and not stream.error and stream.tokens > 300:
            self.whole += 1
        else:
            self.broken.append(f"{stream.tokens} tokens, done: {stream.done}, {stream.error}")
