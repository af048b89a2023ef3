"""The machines that the other tests here stand on: that they are found out, and that a power failure is one."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tests.cluster.lab import eventually
from tests.cluster.net.lab import NetLab
from tests.cluster.streams import ask

ONE = """\
models:
  - name: sim
    profiles:
      - {engine: sim, gpus_per_node: 4, sim: {token_interval: 5ms}}
"""


def test_a_machine_is_found_out_serves_and_loses_its_power(build: Callable[..., NetLab]) -> None:
    """Name, address, GPUs and adapters without a word in its file; then silence, and its replica elsewhere."""
    lab = build(ONE, extra="nodes: {suspect_after: 2s, lost_after: 4s}\n")
    lab.server()
    for name in ("node01", "node02"):
        lab.node(name, fabric="ib-a")
        lab.agent(name)
    nodes = eventually(lambda: len(found := lab.get("nodes")) == 2 and found, "both are registered")
    for node in nodes:
        machine = lab.machines[node["id"]]
        assert (node["inventory"]["hostname"], node["inventory"]["mgmt_addr"]) == (machine.name, machine.address)
        assert len(node["inventory"]["gpus"]) == 8
        assert [fabric["name"] for fabric in node["inventory"]["fabrics"]] == ["ib-a"]
    replica, key = lab.ready(), lab.key()
    assert ask(lab, key).status_code == 200
    where = lab.machines[replica["placements"][0]["node"]]
    assert where.listening() == {int(replica["endpoint"].rpartition(":")[2])}

    before = lab.events()[-1]["id"]
    where.power_off()
    assert ask(lab, key, timeout_s=30).status_code == 200
    after = lab.ready()
    assert after["placements"] != replica["placements"]
    assert lab.events()[-1]["id"] > before


def test_cut_and_healed(build: Callable[..., NetLab]) -> None:
    """Packets vanish without a word to either side, and come through again after."""
    lab = build(ONE)
    node = lab.node("node01")
    listener = socket.create_server((lab.switch.address if lab.switch else "", 0))
    port = str(listener.getsockname()[1])
    dial = ("timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{lab.switch and lab.switch.address}/{port}")
    with listener:
        node.run(*dial)
        node.cut()
        try:
            node.run(*dial)
        except AssertionError:
            node.heal()
            node.run(*dial)
        else:
            raise AssertionError("a packet came through the cut")
