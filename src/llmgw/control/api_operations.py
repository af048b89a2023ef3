"""The part of the admin API by which operators empty nodes, restart models, and ask what would be if."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from llmgw.cluster.what_if import Addition, Changes, WhatIf
from llmgw.control import operations, views
from llmgw.control.drain_views import BrakeView, DrainView, brake_view, drain_view, drain_views
from llmgw.control.engine_views import EngineView, engine_views
from llmgw.control.operations import DrainOptions
from llmgw.control.plane import Plane
from llmgw.control.serials import Serials
from llmgw.control.what_if import suppose

LONGEST_IN_FLIGHT_S = 7 * 86_400.0


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DrainBody(Strict):
    plan: bool = False
    """Only say what would be done."""
    in_flight_s: float | None = Field(default=None, ge=0, le=LONGEST_IN_FLIGHT_S, allow_inf_nan=False)
    allow_downtime: tuple[str, ...] = ()
    force: bool = False
    wait: bool = False


class AddedNodes(Strict):
    nodes: int = Field(ge=1, le=10_000)
    gpus: int = Field(ge=0, le=1_000)
    """Of each."""
    fabric: str | None = Field(default=None, min_length=1, max_length=100)


class WhatIfBody(Strict):
    lose: tuple[str, ...] = ()
    lose_fabrics: tuple[str, ...] = ()
    add: tuple[AddedNodes, ...] = Field(default=(), max_length=100)
    file: str | None = None
    """The text of a changed server.yaml, of which the models are taken."""
    file_name: str = Field(default="the-file-supposed.yaml", min_length=1, max_length=4096)
    """How faults of that file are to name it."""


class RollbackBody(Strict):
    reset: bool = False
    """End the rollback: the file's version is in effect again."""


class RestartBody(Strict):
    allow_downtime: bool = False


def add_operations(router: APIRouter, plane: Plane, folder: Path, serials: Serials | None = None) -> None:
    """``folder``: where this control plane's own file lies."""
    _drains(router, plane)
    _nodes_and_models(router, plane, serials)

    @router.post("/what-if")
    async def what_if(body: WhatIfBody) -> WhatIf:
        """Where everything would be if the cluster were another. Changes nothing."""
        changes = Changes(
            lose_nodes=body.lose,
            lose_fabrics=body.lose_fabrics,
            add=tuple(Addition(nodes=added.nodes, gpus_per_node=added.gpus, fabric=added.fabric) for added in body.add),
        )
        return await suppose(plane, changes, body.file, folder, body.file_name)


def _drains(router: APIRouter, plane: Plane) -> None:
    @router.get("/drains")
    async def drains() -> tuple[DrainView, ...]:
        return drain_views(plane.cluster)

    @router.get("/nodes/{name}/drain")
    async def drain(name: str) -> DrainView:
        return drain_view(plane.cluster, operations.drain_of(plane.cluster, name))

    @router.post("/nodes/{name}/drain")
    async def start_drain(name: str, body: DrainBody | None = None) -> DrainView:
        """Empties a node, or with ``plan`` says what that would do. 409 where it can't be, with the choices."""
        body = body or DrainBody()
        options = DrainOptions(body.in_flight_s, body.allow_downtime, body.force, body.wait)
        if body.plan:
            planned, refusal = operations.plan_drain(plane, name, options)
            return drain_view(plane.cluster, planned, planned=True, refusal=refusal)
        return drain_view(plane.cluster, await operations.drain_node(plane, name, options))

    @router.delete("/nodes/{name}/drain")
    async def undrain(name: str) -> DrainView:
        """The node takes replicas again; what has moved stays where it is. Answers with the drain as it was."""
        drained = await operations.undrain_node(plane, name)
        return drain_view(plane.cluster, drained)


def _nodes_and_models(router: APIRouter, plane: Plane, serials: Serials | None) -> None:
    @router.delete("/nodes/{name}")
    async def remove_node(name: str) -> views.NodeView:
        """Forgets a node that is lost for good, and revokes its certificates."""
        node = await operations.remove_node(plane, name, serials)
        return views.node_view(node, plane.now().monotonic_s)

    @router.post("/models/{name:path}/restart")
    async def restart(name: str, body: RestartBody | None = None) -> views.RestartView:
        """Replaces every replica of the model by a fresh one, one after another, the replacement first."""
        allow_downtime = body is not None and body.allow_downtime
        model, replicas = await operations.restart_model(plane, name, allow_downtime=allow_downtime)
        words = operations.restart_words(model, replicas)
        return views.RestartView(model=model, replicas=replicas, allow_downtime=allow_downtime, words=words)

    @router.post("/engines/{name}/rollback")
    async def rollback(name: str, body: RollbackBody | None = None) -> list[EngineView]:
        """Goes back to the version before the file's, replica by replica; with ``reset`` to the file's again."""
        await operations.roll_back_engine(plane, name, reset=body is not None and body.reset)
        return [view for view in engine_views(plane.cluster) if view.name == name]

    @router.post("/brake/release")
    async def release_brake() -> BrakeView:
        """Judges the silent nodes lost after all."""
        view = brake_view(await operations.release_brake(plane))
        assert view is not None
        return view
