"""An engine's version changed in the file, under requests: followed, not followed, and gone back from."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.agent.install.packing import Archive, behaving, scripted
from tests.cluster.engine import llama
from tests.cluster.lab import Lab, eventually
from tests.cluster.streams import Stream, ask, run_stream

__all__ = ["llama"]

WITHIN_S = 120.0


class Load:
    """Clients that ask one after another, streaming and not, until they are told to stop. They retry nothing."""

    def __init__(self, lab: Lab, key: str) -> None:
        self._lab, self._key = lab, key
        self._stop = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask, self._ask, self._stream)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        while not self._stop.is_set():
            answer = ask(self._lab, self._key, model="tiny")
            self._count("" if answer.status_code == 200 else answer.text)

    def _stream(self) -> None:
        while not self._stop.is_set():
            stream = Stream()
            run_stream(stream, self._lab.endpoint, self._key, 64, "tiny")
            self._count("" if stream.done and not stream.error else stream.error or "ended without [DONE]")

    def _count(self, fault: str) -> None:
        if fault:
            self.failed.append(fault)
        else:
            self.answered += 1


def write(lab: Lab, archive: Archive, model: Path) -> None:
    source = f"{{url: '{archive.path.as_uri()}', sha256: {archive.sha256}}}"
    lab.write_server(
        "models:\n  - name: tiny\n"
        f"    source: file://{model}\n    replicas: 2\n"
        "    profiles: [{engine: llamacpp, memory: 64MiB, context: 256, parallel: 2, args: ['-t', '1']}]\n"
    )
    text = lab.server_file.read_text()
    engines = f"engines: {{llamacpp: {{version: {archive.version}, source: {source}}}}}\n"
    lab.server_file.write_text(text.replace("engines: {}\n", engines))


def change(lab: Lab, archive: Archive, model: Path) -> None:
    write(lab, archive, model)
    with lab.admin() as client:
        client.post("reload")


def replicas(lab: Lab) -> list[dict[str, Any]]:
    return sorted(lab.get("replicas"), key=lambda replica: replica["id"])


def run_on(lab: Lab, version: str) -> bool:
    """All that there is of the model is ready, on this version."""
    there = replicas(lab)
    return len(there) == 2 and all(
        replica["state"] == "ready" and replica["engine_version"] == version for replica in there
    )


def test_an_engine_is_upgraded_under_load_and_gone_back_from(lab: Lab, llama: tuple[Path, Path]) -> None:
    real, model = llama
    folder = lab.root / "archives"
    first, second = (scripted(folder, version, behaving(real, version)) for version in ("b10001", "b10002"))
    silent = scripted(folder, "b10003", 'echo "needs a newer libc" >&2; exit 1')
    # Proves itself on the model that llmgw makes, and fails on any other.
    dies = f'case "$*" in *proof*) exec {real} "$@" ;; esac; echo "no such tensor" >&2; exit 3'
    dying = scripted(folder, "b10004", behaving(real, "b10004", dies))
    folder.chmod(0o755)
    write(lab, first, model)
    lab.server()
    lab.agent("n1")
    eventually(lambda: run_on(lab, "b10001"), "both serve on the first version", WITHIN_S)
    key = lab.key()
    with Load(lab, key) as load:
        change(lab, second, model)
        eventually(lambda: run_on(lab, "b10002"), "both were rolled over", WITHIN_S)

        before = replicas(lab)
        change(lab, silent, model)
        eventually(
            lambda: any(
                "llamacpp b10003" in event["words"] and "failed: " in event["words"]
                for event in lab.events("node.engine")
            ),
            "it is said why the version can't be had",
            WITHIN_S,
        )
        (said,) = [
            event
            for event in lab.events("node.engine")
            if "llamacpp b10003" in event["words"] and "failed: " in event["words"]
        ]
        assert "needs a newer libc" in said["words"]
        assert [(each["id"], each["generation"]) for each in replicas(lab)] == [
            (each["id"], each["generation"]) for each in before
        ]
        assert run_on(lab, "b10002")

        change(lab, dying, model)
        eventually(lambda: lab.events("engine.rolled-back"), "it is gone back from by itself", WITHIN_S)
        (said,) = lab.events("engine.rolled-back")
        assert "llamacpp is rolled back from b10004 to b10002" in said["words"]
        assert "no such tensor" in said["words"], said["words"]
        eventually(lambda: run_on(lab, "b10002"), "all serve on the version before", WITHIN_S)
        asked = load.answered
        eventually(lambda: load.answered > asked + 3, "requests are still answered", 60)
    assert load.failed == []
    versions = {engine["version"] for engine in lab.get("nodes")[0]["engines"] if engine["name"] == "llamacpp"}
    assert {"b10002", "b10004"} <= versions
    assert "b10001" not in versions
