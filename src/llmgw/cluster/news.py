"""What changed on a node, with its old and new value, for events and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.fitness import capable
from llmgw.cluster.model import Cluster, EngineOnNode, EngineState, Fabric, Gpu, Hca, Instant, Inventory, Node
from llmgw.cluster.wording import size


def inventory_news(node_id: str, old: Inventory | None, new: Inventory) -> tuple[str, ...]:
    """What the machine says of itself that it did not say before; nothing where it is described for the first time."""
    if old is None:
        return ()
    news: list[str] = []
    if old.memory_bytes != new.memory_bytes:
        news.append(f"memory {size(old.memory_bytes)} -> {size(new.memory_bytes)}")
    for name, before, after in _plain(old, new):
        if before != after:
            news.append(f"{name} {before or 'none'} -> {after or 'none'}")
    news += _gpu_news(old.gpus, new.gpus)
    news += _hca_news(old.hcas, new.hcas)
    news += _map_news("label", old.labels, new.labels)
    news += _map_news("launch mode of", old.launch_modes, new.launch_modes)
    news += _map_news("fabric", _fabrics(old.fabrics), _fabrics(new.fabrics))
    news += [f"warning: {warning}" for warning in new.warnings if warning not in old.warnings]
    news += [f"no longer warns: {warning}" for warning in old.warnings if warning not in new.warnings]
    return tuple(f"node {node_id}: {words}" for words in news)


def engine_news(old: Sequence[EngineOnNode], new: Sequence[EngineOnNode]) -> tuple[str, ...]:
    """Engines that came, went, began or ceased to work. Steps on the way are not news, nor is failing as before."""
    before, after = _by_installation(old), _by_installation(new)
    return tuple(
        news
        for key in sorted(before.keys() | after.keys())
        if (news := _engine_change(before.get(key), after.get(key)))
    )


def _engine_change(was: EngineOnNode | None, now: EngineOnNode | None) -> str:
    if now is None or was is None:
        there = was or now
        assert there is not None
        which = f"engine {there.name} {there.version}"
        return f"{which} {there.state.value} -> gone" if now is None else f"{which} none -> {_state(there)}"
    if was.version == now.version and not _turned(was, now):
        return ""
    version = "" if was.version == now.version else f"{now.version} "
    return f"engine {was.name} {was.version} {was.state.value} -> {version}{_state(now)}"


def _turned(was: EngineOnNode, now: EngineOnNode) -> bool:
    if now.state is EngineState.FAILED:
        # An agent of the version before does not tell apart why it failed from when it is tried again.
        return now.failed != was.failed or (not now.failed and was.state is not now.state)
    return was.state is not now.state and EngineState.INSTALLED in (was.state, now.state)


def _state(engine: EngineOnNode) -> str:
    return engine.state.value + (f": {engine.words}" if engine.words else "")


def _by_installation(engines: Sequence[EngineOnNode]) -> dict[tuple[str, str], EngineOnNode]:
    """Versions stand side by side; a program of the node's own is the same one, whatever its version."""
    return {(engine.name, "" if engine.named else engine.version): engine for engine in engines}


def now_qualifies(before: Cluster, after: Cluster, node_id: str, now: Instant) -> tuple[str, ...]:
    """Models that the node can take since it changed: by what it is, not by what is placed on it or its connection.

    That does not hang on ``now``, which is taken so that this is asked as ``place`` is.
    """
    node = after.nodes.get(node_id)
    if node is None:
        return ()
    return tuple(
        f"node {node_id} now qualifies for {spec.name}"
        for spec in after.catalog.models
        if _takes(node, spec) and not _took(before.nodes.get(node_id), spec)
    )


def _takes(node: Node, spec: ModelSpec) -> bool:
    return any(capable(node, spec, profile) for profile in spec.profiles)


def _took(node: Node | None, spec: ModelSpec) -> bool:
    return node is not None and _takes(node, spec)


def _plain(old: Inventory, new: Inventory) -> list[tuple[str, object, object]]:
    names = ("hostname", "os", "kernel", "libc", "driver", "mgmt_addr", "mgmt_interface", "gpu_source")
    plain: list[tuple[str, object, object]] = [
        (
            name.replace("mgmt_addr", "management address").replace("mgmt_interface", "management interface"),
            getattr(old, name),
            getattr(new, name),
        )
        for name in names
    ]
    plain.append(("CPU", old.cpu.model, new.cpu.model))
    plain.append(("CPU cores", old.cpu.cores, new.cpu.cores))
    plain.append(("CPU extensions", " ".join(old.cpu.extensions), " ".join(new.cpu.extensions)))
    plain.append(("ports", str(old.ports), str(new.ports)))
    return plain


def _gpu_news(old: Sequence[Gpu], new: Sequence[Gpu]) -> list[str]:
    before, after = {gpu.uuid: gpu for gpu in old}, {gpu.uuid: gpu for gpu in new}
    news = []
    if len(old) != len(new):
        news.append(f"GPUs {len(old)} -> {len(new)}")
    news += [f"{_gpu(gpu)} is gone" for gpu in old if gpu.uuid not in after]
    for gpu in new:
        was = before.get(gpu.uuid)
        if was is None:
            news.append(f"{_gpu(gpu)} is new" + (f": {gpu.problem}" if gpu.problem else ""))
            continue
        if was.problem != gpu.problem:
            news.append(f"{_gpu(gpu)}: {was.problem or 'usable'} -> {gpu.problem or 'usable'}")
        if was.memory_bytes != gpu.memory_bytes:
            news.append(f"{_gpu(gpu)}: memory {_known(was.memory_bytes)} -> {_known(gpu.memory_bytes)}")
        if was.index != gpu.index:
            news.append(f"{_gpu(gpu)}: index {was.index} -> {gpu.index}")
    return news


def _hca_news(old: Sequence[Hca], new: Sequence[Hca]) -> list[str]:
    return _map_news("adapter", _hcas(old), _hcas(new))


def _hcas(hcas: Sequence[Hca]) -> dict[str, str]:
    return {f"{hca.name}/{hca.port}": hca.state + (f" ({hca.problem})" if hca.problem else "") for hca in hcas}


def _map_news(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {key} {old.get(key, 'none')} -> {new.get(key, 'none')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _fabrics(fabrics: Sequence[Fabric]) -> dict[str, str]:
    return {fabric.name: " ".join(fabric.hcas) for fabric in fabrics}


def _gpu(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name}, {gpu.uuid})"


def _known(size_bytes: int | None) -> str:
    return "not said" if size_bytes is None else size(size_bytes)
