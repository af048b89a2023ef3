"""What operators do, at random, through whichever control plane answers them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from llmgw.cluster.catalog import ModelSpec

from .control import ControlPlane
from .scenario import changed

if TYPE_CHECKING:
    from .world import World


class Operator:
    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        acts: list[tuple[int, Callable[[ControlPlane], None]]] = [
            (6, self.scale),
            (3, self.reload),
        ]
        self._weights = [weight for weight, _ in acts]
        self._acts = [act for _, act in acts]

    def begin(self) -> None:
        self.world.timeline.after(self.rng.uniform(5.0, 20.0), self._next)

    def _next(self) -> None:
        if not self.world.faulty:
            return
        plane = self._reached()
        if plane is not None:
            self.rng.choices(self._acts, self._weights)[0](plane)
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
        world.catalog = changed(self.rng, world.catalog, world.scenario.catalog)
        self._tell("changes the file: {}", "; ".join(map(_in_short, world.catalog.models)))
        for plane in world.planes:
            if plane.listening:
                self._take_file(plane)

    def _take_file(self, process: ControlPlane) -> None:
        world, plane = self.world, process.plane
        assert plane is not None
        plane.tell(
            lambda: plane.take_catalog(
                world.catalog, suspect_after_s=world.suspect_after_s, lost_after_s=world.lost_after_s, in_flight_s=world.in_flight_s
            )
        )
        process.wake()

    def leave(self) -> None:
        """What is undone before the end, so that there is one wished state."""


def _in_short(spec: ModelSpec) -> str:
    profiles = ", ".join(
        f"{each.name} {each.nodes}x{each.gpus_per_node} {each.context} {' '.join(each.args)}" for each in spec.profiles
    )
    return f"{spec.name} x{spec.replicas} {' '.join(spec.aliases)} ({profiles})"
