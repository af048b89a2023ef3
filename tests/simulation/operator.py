"""What operators do, at random, through whichever control plane answers them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmgw.cluster.catalog import Catalog, EngineSpec, ModelSpec
from llmgw.cluster.model import NodeState
from llmgw.control import operations

from .builds import ENGINE
from .control import ControlPlane
from .scenario import changed, mended

if TYPE_CHECKING:
    from .world import World


class Operator:
    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        acts: list[tuple[int, Callable[[ControlPlane], None]]] = [
            (6, self.scale),
            (4, self.reload),
            (4, self.drain),
            (3, self.undrain),
            (2, self.restart),
            (1, self.release_brake),
            (1, self.remove_node),
        ]
        if world.builds.used:
            acts += [(4, self.change_engine), (1, self.roll_back)]
        self._weights = [weight for weight, _ in acts]
        self._acts = [act for _, act in acts]
        self._take_back = False

    def begin(self) -> None:
        self.world.timeline.after(self.rng.uniform(5.0, 20.0), self._next)

    def _next(self) -> None:
        if not self.world.faulty:
            return
        plane = self._reached()
        if plane is not None:
            self.rng.choices(self._acts, self._weights)[0](plane)
            if self.rng.random() < 0.3:
                # Who changes one thing often changes another in the next moment.
                self.world.timeline.after(self.rng.uniform(0.0, 1.5), self._next)
                return
        self.world.timeline.after(self.rng.expovariate(1.0 / self.world.scenario.act_every_s), self._next)

    def _reached(self) -> ControlPlane | None:
        answering = [plane for plane in self.world.planes if plane.listening and not plane.stopped]
        return self.rng.choice(answering) if answering else None

    def _tell(self, words: str, *arguments: object) -> None:
        self.world.story.tell("OPERATOR", words, *arguments)

    def scale(self, process: ControlPlane) -> None:
        assert process.plane is not None
        models = [spec.name for spec in self.world.catalog.models]
        if models:
            model = self.rng.choice(models)
            replicas = self.rng.choice((None, 0, 1, 1, 2, 2, 3, 4))
            self._tell("scales {} to {}", model, replicas)
            process.plane.tell(partial(process.plane.set_scale, model, replicas))
            process.wake()

    def reload(self, process: ControlPlane) -> None:
        world = self.world
        self._write(changed(self.rng, world.catalog, world.first_catalog))

    def change_engine(self, process: ControlPlane) -> None:
        builds = self.world.builds
        self._write_engine(builds.new() if builds.rng.random() < 0.7 else builds.another())

    def _write_engine(self, spec: EngineSpec) -> None:
        builds = self.world.builds
        self._tell("changes the file to {} {}: {}", spec.name, spec.version, builds.known[spec.version])
        self._write(replace(self.world.catalog, engines=(spec,)))

    def roll_back(self, process: ControlPlane) -> None:
        assert process.plane is not None
        reset = self.world.builds.rng.random() < 0.4
        asked = operations.roll_back_engine(process.plane, ENGINE, reset=reset)
        self._ask(process, asked, "rolls {} back, reset {}", ENGINE, reset)

    def _write(self, catalog: Catalog) -> None:
        world = self.world
        world.catalog = catalog
        self._tell("changes the file: {}", "; ".join(map(_in_short, catalog.models)))
        for plane in world.planes:
            if plane.listening:
                self._take_file(plane)

    def _take_file(self, process: ControlPlane) -> None:
        world, plane = self.world, process.plane
        assert plane is not None
        plane.tell(
            lambda: plane.take_catalog(
                world.catalog,
                suspect_after_s=world.suspect_after_s,
                lost_after_s=world.lost_after_s,
                in_flight_s=world.in_flight_s,
            )
        )
        process.wake()

    def _ask(self, process: ControlPlane, asked: Coroutine[Any, Any, object], words: str, *arguments: object) -> None:
        """As the admin API does; what comes of it is told."""
        self._tell(words, *arguments)
        process.drive(asked, lambda result: None, lambda error: self._refused(error))
        process.wake()

    def _refused(self, error: Exception) -> None:
        self.world.checks.counted["operators refused"] += 1
        self._tell("is refused: {}", error)

    def drain(self, process: ControlPlane) -> None:
        assert process.plane is not None
        rng = self.rng
        models = [spec.name for spec in self.world.catalog.models]
        options = operations.DrainOptions(
            in_flight_s=rng.choice((None, None, 1.0, 20.0)),
            allow_downtime=(rng.choice(models),) if models and rng.random() < 0.2 else (),
            force=rng.random() < 0.15,
            wait=rng.random() < 0.4,
        )
        node = rng.choice(self.world.machines).id
        self._ask(process, operations.drain_node(process.plane, node, options), "drains {}: {}", node, options)

    def undrain(self, process: ControlPlane) -> None:
        assert process.plane is not None
        drained = sorted(process.plane.cluster.drains)
        if drained:
            node = self.rng.choice(drained)
            self._ask(process, operations.undrain_node(process.plane, node), "undrains {}", node)

    def restart(self, process: ControlPlane) -> None:
        assert process.plane is not None
        models = [spec.name for spec in self.world.catalog.models]
        if models:
            model, downtime = self.rng.choice(models), self.rng.random() < 0.3
            asked = operations.restart_model(process.plane, model, allow_downtime=downtime)
            self._ask(process, asked, "restarts {}, downtime {}", model, downtime)

    def release_brake(self, process: ControlPlane) -> None:
        assert process.plane is not None
        if process.plane.cluster.brake is not None:
            self._ask(process, operations.release_brake(process.plane), "releases the brake")

    def remove_node(self, process: ControlPlane) -> None:
        assert process.plane is not None
        lost = [node.id for node in process.plane.cluster.nodes.values() if node.state is NodeState.LOST]
        if lost:
            node = self.rng.choice(lost)
            self._ask(process, operations.remove_node(process.plane, node), "forgets {}", node)

    def leave(self) -> None:
        """What is put right before the end, so that the wished state can be reached."""
        self._write(mended(self.world.catalog))
        self._mend_engine()
        self._take_back = self.rng.random() < 0.5
        self.put_right()

    def _mend_engine(self) -> None:
        """At times the version in the file stays, whatever it is: there is one to go back to then."""
        builds, leader = self.world.builds, self.world.leader()
        if not builds.used:
            return
        history = leader.plane.cluster.engines.get(ENGINE) if leader is not None and leader.plane is not None else None
        # Who leads may not have taken up yet what was written last.
        before = history.previous if history is not None and (history.spec,) == self.world.catalog.engines else None
        if before is None or not builds.is_sound(before.version) or builds.rng.random() < 0.4:
            self._write_engine(builds.sound())

    def put_right(self) -> None:
        """Ends drains where they are to end, now or as soon as somebody leads."""
        leader = self.world.leader()
        if self._take_back and leader is not None and leader.plane is not None:
            for node in sorted(leader.plane.cluster.drains):
                self._ask(leader, operations.undrain_node(leader.plane, node), "undrains {}", node)


def _in_short(spec: ModelSpec) -> str:
    profiles = ", ".join(
        f"{each.name} {each.nodes}x{each.gpus_per_node} {each.context} {' '.join(each.args)}" for each in spec.profiles
    )
    return f"{spec.name} x{spec.replicas} {' '.join(spec.aliases)} ({profiles})"
