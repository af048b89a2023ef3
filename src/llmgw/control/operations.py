"""What operators have done to nodes and models: drained, restarted, forgotten, judged lost after all.

Each judges and acts in one turn of the plane, on the cluster as it is then. What can't be done is refused with an
ApiError, and nothing was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmgw.cluster import drain as draining
from llmgw.cluster import engines, rolling
from llmgw.cluster.actions import Note, PutBrake, PutDrain, RemoveDrain
from llmgw.cluster.model import Brake, Cluster, Drain, DrainState, Node, NodeState
from llmgw.cluster.wording import count
from llmgw.control.certificate_operations import forget
from llmgw.control.errors import ApiError, not_found
from llmgw.control.names import model_named, node_named, running_model_named
from llmgw.control.plane import Plane
from llmgw.control.serials import Serials


@dataclass(frozen=True, slots=True)
class DrainOptions:
    in_flight_s: float | None = None
    allow_downtime: tuple[str, ...] = ()
    force: bool = False
    wait: bool = False


def plan_drain(plane: Plane, node: str, options: DrainOptions) -> tuple[Drain, str | None]:
    """What a drain would do, and why it would be refused. Changes nothing. Raises ApiError where nothing of the node
    could ever be drained."""
    cluster = plane.cluster
    if node_named(cluster, node).state is NodeState.REVOKED:
        words = f"{node} is revoked: nothing is placed on it, so that there is nothing to drain"
        raise ApiError(409, "node_revoked", words, f"llmgw ctl node remove {node} forgets it")
    drain = draining.plan(
        cluster,
        node,
        now=plane.now(),
        in_flight_s=options.in_flight_s,
        allow_downtime=[running_model_named(cluster, model) for model in options.allow_downtime],
        force=options.force,
        wait=options.wait,
    )
    return drain, draining.refusal(drain)


async def drain_node(plane: Plane, node: str, options: DrainOptions) -> Drain:
    """Have the node emptied as ``plan_drain`` says; on one that is being drained already, change the options."""

    async def act() -> None:
        # Planned here, so that what is carried out is what the cluster allows now.
        drain, refusal = plan_drain(plane, node, options)
        if refusal is not None:
            raise ApiError(409, "drain_refused", refusal, f"llmgw ctl drain {node} --plan shows every replica")
        before = plane.cluster.drains.get(node)
        if before is not None and before.state is DrainState.DONE and len(drain.moves) == len(before.moves):
            return  # it is drained already, and nothing has come since
        is_new = before is None
        words = f"{node} is to be emptied: {drain.why}" if is_new else f"drained with other options: {drain.why}"
        note = Note("drain.started" if is_new else "drain.changed", node, words)
        await plane.carry_out((PutDrain(drain), note))

    await plane.ask(act)
    return plane.cluster.drains.get(node) or drain_of(plane.cluster, node)


async def undrain_node(plane: Plane, node: str) -> Drain:
    """Let the node take replicas again. What has moved stays where it is; returns the drain as it was."""

    async def act() -> Drain:
        drain = drain_of(plane.cluster, node)
        words = f"{node} takes replicas again; what has moved stays where it is"
        await plane.carry_out((RemoveDrain(node), Note("drain.cancelled", node, words)))
        return drain

    return await plane.ask(act)


def drain_of(cluster: Cluster, node: str) -> Drain:
    """The drain of a node. Raises ApiError where it is not being drained."""
    node_named(cluster, node)
    if (drain := cluster.drains.get(node)) is None:
        words = f"{node} is not being drained"
        raise ApiError(404, "drain_not_found", words, f"llmgw ctl drain {node} --plan shows what a drain would do")
    return drain


async def restart_model(plane: Plane, name: str, *, allow_downtime: bool) -> tuple[str, tuple[str, ...]]:
    """Have every replica replaced by a fresh one, one after another; returns the model and their ids."""

    async def act() -> tuple[str, tuple[str, ...]]:
        cluster = plane.cluster
        model = model_named(cluster, name)
        actions = rolling.restart(cluster, model, allow_downtime, plane.now())
        if actions:
            await plane.carry_out(actions)
        replicas = tuple(
            replica.id
            for _, replica in sorted(plane.cluster.replicas.items())
            if replica.model == model and (replica.restart or replica is not cluster.replicas.get(replica.id))
        )
        if not replicas:
            words = f"{model} has no replica that could be restarted"
            raise ApiError(409, "nothing_to_restart", words, f"llmgw ctl why {model}")
        return model, replicas

    return await plane.ask(act)


async def roll_back_engine(plane: Plane, name: str, *, reset: bool) -> None:
    """Have the version before the file's be in effect; with ``reset`` the file's again."""

    async def act() -> None:
        cluster = plane.cluster
        if cluster.catalog.engine(name) is None:
            raise not_found("engine", name, [spec.name for spec in cluster.catalog.engines])
        try:
            actions = (
                engines.reset(cluster, name, plane.now())
                if reset
                else engines.roll_back(cluster, name, "an operator asked for it", plane.now())
            )
        except engines.CantRollBack as error:
            raise ApiError(409, "no_rollback", str(error), "llmgw ctl engines shows every version") from error
        await plane.carry_out(actions)

    await plane.ask(act)


async def release_brake(plane: Plane) -> Brake:
    """The silent nodes are gone indeed: have them judged as ever."""

    async def act() -> Brake:
        brake = plane.cluster.brake
        if brake is None:
            raise ApiError(409, "no_brake", "the brake is not on: nodes are judged as ever", "llmgw ctl status")
        released = replace(brake, released=True)
        words = f"released by an operator: {count(len(brake.silent), 'silent node')} may be judged lost"
        await plane.carry_out((PutBrake(released), Note("node.brake", "", words)))
        return released

    return await plane.ask(act)


async def remove_node(plane: Plane, name: str, serials: Serials | None = None) -> Node:
    """Forget a node that is gone for good: its certificates are refused from now on, and its name is free."""

    async def act() -> Node:
        node = node_named(plane.cluster, name)
        _refuse_to_remove(node)
        words = "forgotten by an operator; what was lost with it is not waited for any more"
        if serials is not None:
            await forget(plane, serials, name, words)
        else:
            await plane.remove_node(name, words)
        return node

    return await plane.ask(act)


def _refuse_to_remove(node: Node) -> None:
    if node.session is not None:
        words = f"{node.id} is connected: only a node that is lost can be forgotten"
        raise ApiError(409, "node_connected", words, f"llmgw ctl drain {node.id}, then stop its agent for good")
    if node.state not in (NodeState.LOST, NodeState.REVOKED):
        words = f"{node.id} is {node.state}, not lost: what runs on it may still be there"
        raise ApiError(409, "node_not_lost", words, "stop its agent, and try again once it is lost")


def restart_words(model: str, replicas: Sequence[str]) -> str:
    be = "is" if len(replicas) == 1 else "are"
    what = f"{count(len(replicas), 'replica')} of {model} {be} replaced by fresh ones, one after another"
    return f"{what}: `llmgw ctl why {model}` says how far that is"
