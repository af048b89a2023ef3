"""An engine of small scripts with sidecars around it: real processes that do what a test says.

Run as a program, an agent with one such shard, which is there to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmgw.agent.install import Program
from llmgw.agent.install.named import NamedKeeper
from llmgw.cluster.model import DesiredShard
from llmgw.engines import registry
from llmgw.engines.base import Command, Engine, Launch, Probe, Sidecar
from llmgw.engines.load import LoadMetrics
from tests.agent.node import Node, sim

PYTHON = (sys.executable, "-I", "-S", "-u", "-c")

SERVE = """
import http.server, os, signal, sys
host, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code = 503 if os.path.exists(folder + "/loading") else 200
        self.send_response(code)
        self.end_headers()
    def log_message(self, *arguments):
        pass
def ends(*arguments):
    with open(folder + "/ends", "a") as file:
        file.write("engine\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, ends)
server = http.server.HTTPServer((host, port), Answers)
print("serving", flush=True)
with open(folder + "/starts", "a") as file:
    file.write("engine\\n")
server.serve_forever()
"""

STAYS = """
echo "{name} is up"; echo {name} >> {folder}/starts
exec 2>/dev/null
trap 'echo {name} >> {folder}/ends; exit 0' TERM
while :; do sleep 0.02; done
"""


class Crewed(Engine):
    name = "vllm"
    starts_slowly_s = 20.0
    worker_programs: tuple[str, ...] = ()
    load_metrics: LoadMetrics | None = None

    def __init__(self, folder: Path, *sidecars: Sidecar, serves: bool = True) -> None:
        self.folder = folder
        self.sidecars = sidecars
        self.serves = serves
        self.launches: list[Launch] = []

    def command(self, launch: Launch) -> Command:
        self.launches.append(launch)
        port = launch.shard.placement.port
        argv = (*launch.program, SERVE, launch.host, str(port), str(self.folder)) if self.serves else ()
        endpoint = f"{launch.host}:{port}" if self.serves else None
        return Command(argv=argv, env={}, endpoint=endpoint, sidecars=self.sidecars)

    def refusal(self, shard: DesiredShard) -> str | None:
        return None

    def loads_weights(self, rank: int) -> bool:
        return False

    def metrics(self) -> Probe | None:
        return None

    def health(self) -> Probe:
        return Probe(method="GET", path="/health")

    def read_health(self, status: int, body: bytes) -> str | None:
        return None if status == 200 else "loading"

    def readiness(self, shard: DesiredShard) -> Probe:
        return Probe(method="GET", path="/")

    def read_readiness(self, shard: DesiredShard, status: int, body: bytes) -> str | None:
        return None if status == 200 else "no answer"

    def read_version(self, output: str) -> str | None:
        return None


def sidecar(name: str, folder: Path, script: str = STAYS, **more: Any) -> Sidecar:
    argv = ("/bin/sh", "-c", script.format(name=name, folder=folder))
    return Sidecar(name=name, argv=argv, env={"MARK": name}, **more)


def shell(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def crewed(generation: int = 1, **more: Any) -> DesiredShard:
    shard = sim(generation, **more)
    return replace(shard, profile=replace(shard.profile, engine="vllm", sim=None))


@contextmanager
def known(adapter: Crewed) -> Iterator[Crewed]:
    """While it lasts, agents of this process know the engine."""
    engines = dict(registry.ENGINES)
    registry.ENGINES = {**engines, "vllm": adapter}
    try:
        yield adapter
    finally:
        registry.ENGINES = engines


def install(node: Node) -> None:
    installer = node.installer
    named = NamedKeeper("vllm", Path(PYTHON[0]), installer._recipes, node.folder / "proofs", installer._changed)
    named.program = Program(argv=PYTHON, version="1", help_text="", reads=())
    installer._named["vllm"] = named
    installer._changed()


def starts(folder: Path) -> list[str]:
    return _lines(folder / "starts")


def ends(folder: Path) -> list[str]:
    return _lines(folder / "ends")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def whole(folder: Path) -> Crewed:
    """Two sidecars: one that is asked whether it is ready, and says so once a file is there; one that is not asked."""
    ray = sidecar("ray", folder, ready_argv=shell(f"test -e {folder}/ray-ready"), ready_within_s=30.0)
    return Crewed(folder, ray, sidecar("metrics", folder))


def news(node: Node) -> str:
    return "".join(f"{shard.state.value}: {shard.why}" for shard in node.converge.shards())


async def _agent(folder: Path, port: int) -> None:
    """Says every state that its shard is in, until it is killed."""
    with known(whole(folder)):
        node = Node(folder)
        install(node)
        await node.open()
        node.want(crewed(port=port))
        said = [""]
        while True:
            await node.until(lambda: news(node) != said[-1], "it goes on")
            said.append(news(node))
            print(said[-1], flush=True)


if __name__ == "__main__":
    asyncio.run(_agent(Path(sys.argv[1]), int(sys.argv[2])))
