"""The reference case: four nodes on two fabrics, a replica over the two nodes of each, and a real engine on the same
machines throughout. Used by the tests, once, and by the soak runs, many times."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster.lab import eventually
from tests.cluster.net.lab import Inside, NetLab
from tests.cluster.net.load import Load
from tests.cluster.net.machine import Machine
from tests.cluster.streams import ask

FABRICS = {"node01": "ib-a", "node02": "ib-a", "node03": "ib-b", "node04": "ib-b"}
WIDE = """\
  - name: wide
    replicas: 2
    profiles: [{engine: sim, nodes: 2, gpus_per_node: 4, sim: {token_interval: 20ms}}]
"""
QUICK = "nodes: {suspect_after: 2s, lost_after: 5s}\n"


def models(gguf: Path | None = None) -> str:
    """The two-node model, and with a file also a real one on the processors."""
    if gguf is None:
        return f"models:\n{WIDE}"
    real = (
        f"  - {{name: real, source: 'file://{gguf}', profiles: [{{engine: llamacpp, memory: 256MiB, context: 512}}]}}\n"
    )
    return f"models:\n{WIDE}{real}"


@dataclass
class Reference:
    """The cluster, up and serving. ``failed_over`` is the case itself."""

    lab: NetLab
    key: str = ""
    agents: dict[str, Inside] = field(default_factory=dict)
    server: Any = None

    @classmethod
    def start(cls, lab: NetLab, llama: Path | None = None, *, replicas: int = 2) -> Reference:
        case = cls(lab)
        wanted = lab.without_models()
        case.server = lab.server()
        named = f"engines: {{llamacpp: {{bin: {llama}}}}}\n" if llama else ""
        for name, fabric in FABRICS.items():
            lab.node(name, fabric=fabric, extra=named)
            case.agents[name] = lab.agent(name)
        lab.with_models(wanted)
        case.ready(replicas, 90)
        case.key = lab.key()
        return case

    # -- what there is

    def wide(self) -> list[dict[str, Any]]:
        return [replica for replica in self.lab.get("replicas") if replica["model"] == "wide"]

    def ready(self, count: int, within_s: float) -> list[dict[str, Any]]:
        """So many replicas of the wide model are ready, each whole on one fabric."""

        def check() -> list[dict[str, Any]] | None:
            found = [replica for replica in self.wide() if replica["state"] == "ready"]
            return found if len(found) == count else None

        try:
            found = eventually(check, f"{count} wide replicas are ready", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.wide()}\n{self.lab.logs()}") from None
        for replica in found:
            assert len(nodes_of(replica)) == 2
            assert len({FABRICS[node] for node in nodes_of(replica)}) == 1, f"{replica['id']} spans fabrics: {replica}"
            assert [len(placement["gpus"]) for placement in replica["placements"]] == [4, 4]
        return found

    def only_leaders_listen(self) -> None:
        """HTTP and rendezvous on a leader; nothing at all on a node that has workers alone."""
        expected: dict[str, set[int]] = {name: set() for name in FABRICS}
        for replica in self.lab.get("replicas"):
            host, _, port = replica["endpoint"].rpartition(":")
            leader = replica["placements"][0]["node"]
            assert host == self.lab.machines[leader].address
            expected[leader].add(int(port))
            if replica["dist_init"]:
                expected[leader].add(int(replica["dist_init"].rpartition(":")[2]))
        found = {name: self.lab.machines[name].listening() for name in FABRICS if self.lab.machines[name].powered}
        assert found == {name: ports for name, ports in expected.items() if name in found}

    # -- the case

    def failed_over(
        self,
        lost: str = "node02",
        *,
        load: Load | None = None,
        within_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> float:
        """Powers a node off; seconds until as many replicas are ready again, whole on the other fabric."""
        fabric, other = FABRICS[lost], next(name for name in FABRICS.values() if name != FABRICS[lost])
        victim = next(replica for replica in self.ready(2, 10) if lost in nodes_of(replica))
        survivor = next(node for node in nodes_of(victim) if node != lost)
        began_s = time.monotonic()
        self.lab.machines[lost].power_off()
        meanwhile()
        found = self.ready_elsewhere(victim["id"], within_s)
        took_s = time.monotonic() - began_s
        for replica in found:
            assert {FABRICS[node] for node in nodes_of(replica)} == {other}, f"not whole on {other}: {replica}"
        eventually(
            lambda: not self.lab.machines[survivor].listening() - self.real_ports(survivor),
            f"{survivor} is left idle: {fabric} can't hold a whole replica",
            20,
        )
        if load is not None:
            assert not load.failed, load.words()
        return took_s

    def ready_elsewhere(self, victim: str, within_s: float) -> list[dict[str, Any]]:
        """Two are ready, and the one that was lost is none of them (or has moved as a new generation)."""

        def check() -> list[dict[str, Any]] | None:
            found = [replica for replica in self.wide() if replica["state"] == "ready"]
            moved = all(replica["id"] != victim or replica["generation"] > 1 for replica in found)
            return found if len(found) == 2 and moved else None

        try:
            return eventually(check, "the lost replica is ready elsewhere", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.wide()}\n{self.lab.logs()}") from None

    def ready_elsewhere_or_again(self, victim: dict[str, Any], within_s: float) -> None:
        """The model's one replica is ready, and is not the generation that it was."""

        def check() -> bool:
            return any(
                found["state"] == "ready" and (found["id"], found["generation"]) != (victim["id"], victim["generation"])
                for found in self.wide()
            )

        eventually(check, "it is rebuilt", within_s)

    def kill_rank(self, replica: dict[str, Any], rank: int) -> None:
        """Ends the engine of one rank, as the kernel does when there is no memory left."""
        machine = self.lab.machines[nodes_of(replica)[rank]]
        machine.run("kill", "-9", str(replica["pids"][rank]))

    def real_ports(self, node: str) -> set[int]:
        """Ports of the real engine's replicas on the node."""
        return {
            int(replica["endpoint"].rpartition(":")[2])
            for replica in self.lab.get("replicas")
            if replica["model"] == "real" and replica["endpoint"] and nodes_of(replica) == [node]
        }

    def served(self, model: str = "wide") -> None:
        answer = ask(self.lab, self.key, model=model)
        assert answer.status_code == 200, answer.text


def nodes_of(replica: dict[str, Any]) -> list[str]:
    return [placement["node"] for placement in replica["placements"]]


def tables(lab: NetLab) -> list[tuple[datetime, int]]:
    """Every routing table that the gateway took up, in order: when, and how many replicas it names."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", (lab.root / "state" / "gateway.log").read_text())
    rows = [line for line in text.splitlines() if "routing table" in line and "version=" in line]
    times = [re.search(r"\d{4}-\d\d-\d\dT[\d:.]+Z", row) for row in rows]
    return [
        (datetime.fromisoformat(at[0]), int(re.search(r"replicas=(\d+)", row)[1]))  # type: ignore[index]
        for at, row in zip(times, rows, strict=True)
    ]


def drained(lab: NetLab, node: str, within_s: float = 90) -> dict[str, Any]:
    """Empties the node; what the report of it says."""
    with lab.admin() as client:
        client.post(f"nodes/{node}/drain", {})

    def done() -> dict[str, Any] | None:
        report: dict[str, Any] = lab.get(f"nodes/{node}/drain")
        return report if report["state"] == "done" else None

    try:
        return eventually(done, f"{node} is drained", within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{lab.get(f'nodes/{node}/drain')}\n{lab.logs()}") from None


def partitioned(build: Callable[..., NetLab], *, extra: str, until_replaced: bool, cut_s: float = 0.0) -> None:
    """Cuts a node off from all others, and heals it once its replica is ready elsewhere (or being rebuilt there)."""
    load_time = "1s" if until_replaced else "20s"
    lab = build(
        "models:\n  - name: narrow\n    replicas: 2\n    profiles:\n"
        f"      - {{engine: sim, gpus_per_node: 4, sim: {{load_time: {load_time}, token_interval: 20ms}}}}\n",
        extra=extra,
    )
    wanted = lab.without_models()
    lab.server()
    names = ("node01", "node02", "node03")
    for name in names:
        lab.node(name)
        lab.agent(name)
    lab.with_models(wanted)
    before = eventually(lambda: whole(lab, 2), "both are ready", 90)
    key = lab.key()
    cut_off = next(name for name in names if any(nodes_of(replica) == [name] for replica in before.values()))
    originals = {id for id, replica in before.items() if nodes_of(replica) == [cut_off]}
    node = lab.machines[cut_off]
    engines = simulators(node)
    began_s = time.monotonic()
    node.cut()

    if until_replaced:
        eventually(lambda: (found := whole(lab, 2)) and not originals & found.keys(), "it is replaced", 90)
    else:
        eventually(lambda: any(r["state"] in ("starting", "placing") for r in lab.get("replicas")), "it is begun", 90)
    assert ask(lab, key, model="narrow").status_code == 200
    assert simulators(node) == engines, "an engine was touched on a node that was cut off"
    threading.Event().wait(max(0.0, cut_s - (time.monotonic() - began_s)))
    node.heal()

    after = eventually(
        lambda: (found := whole(lab, 2)) and len(lab.get("replicas")) == 2 and found, "two are left, both ready", 60
    )
    if until_replaced:
        assert not originals & after.keys()
        eventually(lambda: not simulators(node) & engines, "the extra one is stopped", 30)
    else:
        assert after.keys() == before.keys()
        assert simulators(node) == engines
    assert {id: replica["generation"] for id, replica in after.items()} == dict.fromkeys(after, 1)
    assert ask(lab, key, model="narrow").status_code == 200


def whole(lab: NetLab, count: int) -> dict[str, dict[str, Any]] | None:
    """The ready replicas by id, if they are so many and all nodes that they are on answer."""
    ready = {replica["id"]: replica for replica in lab.get("replicas") if replica["state"] == "ready"}
    return ready if len(ready) == count else None


def simulators(node: Machine) -> set[int]:
    """Engines' processes on a machine."""
    found = set()
    for pid in node.pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"llmgw.simulator" in line:
            found.add(pid)
    return found
