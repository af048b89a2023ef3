"""What a seed stands for: the machines, the catalog, the settings, and how often what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile, SimOptions
from llmgw.cluster.model import Cpu, Fabric, Gpu, Hca, Inventory, PortRange

from .machine import BROKEN

GIB = 1 << 30
SUBNETS = {"ib-a": "fe80:0000:0000:000a", "ib-b": "fe80:0000:0000:000b"}
ADAPTERS = {"ib-a": ("mlx5_0", "mlx5_1"), "ib-b": ("mlx5_2", "mlx5_3")}
CPU = Cpu(model="EPYC", architecture="x86_64", cores=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    inventories: tuple[Inventory, ...]
    catalog: Catalog
    planes: int
    gateways: int
    heartbeat_s: float
    suspect_after_s: float
    lost_after_s: float
    in_flight_s: float
    lease_s: float
    fault_every_s: float
    act_every_s: float
    request_every_s: float
    stream_s: float
    """How long a request streams, at most."""
    chances: dict[str, float] = field(default_factory=dict)
    """How likely it is that something goes wrong each time it is done, by its name."""


def draw(rng: Random) -> Scenario:
    count = rng.choice((2, 3, 3, 4, 4, 5, 6))
    lost_after_s = rng.choice((8.0, 15.0, 30.0))
    heartbeat_s = rng.choice((2.0, 5.0)) if lost_after_s >= 15.0 else 2.0
    calm = rng.random()
    return Scenario(
        inventories=tuple(inventory(rng, number) for number in range(1, count + 1)),
        catalog=Catalog(models=tuple(model(rng, name) for name in ("alpha", "beta", "gamma")[: rng.randint(1, 3)])),
        planes=rng.choice((1, 1, 2, 3)),
        gateways=rng.choice((1, 1, 2)),
        heartbeat_s=heartbeat_s,
        suspect_after_s=max(2.5 * heartbeat_s, lost_after_s / 2),
        lost_after_s=lost_after_s,
        in_flight_s=rng.choice((5.0, 30.0, 120.0)),
        lease_s=rng.choice((5.0, 15.0, 30.0)),
        fault_every_s=rng.choice((1.0, 3.0, 6.0)),
        act_every_s=rng.choice((1.0, 4.0, 10.0)),
        request_every_s=rng.choice((1.0, 3.0, 6.0)),
        stream_s=rng.choice((1.0, 5.0, 20.0)),
        chances={
            "exit_at_start": 0.03 * calm,
            "slow_load": 0.1 * calm,
            "stop_stuck": 0.1,
            "late_ack": 0.1,
            "memory_lost": 0.05,
            "store_slow": 0.06,
            "store_fails": 0.02 * calm,
            "long_weights": 0.1,
            "install_fails": 0.1,
        },
    )


def inventory(rng: Random, number: int) -> Inventory:
    gpus = rng.choice((0, 2, 2, 4, 4))
    fabrics = rng.choice(((), ("ib-a",), ("ib-a",), ("ib-b",), ("ib-a", "ib-b")))
    return Inventory(
        hostname=f"n{number}",
        os="Debian GNU/Linux 12",
        kernel="6.1.0",
        libc="glibc 2.36",
        cpu=CPU,
        memory_bytes=64 * GIB,
        mgmt_addr=f"10.0.0.{number}",
        mgmt_interface="eth0",
        gpus=tuple(
            Gpu(index=index, uuid=f"GPU-{number}-{index}", name="H200", memory_bytes=141 * GIB, nvlink_group=index // 2)
            for index in range(gpus)
        ),
        hcas=tuple(hca(name, fabric, number) for fabric in fabrics for name in ADAPTERS[fabric]),
        fabrics=tuple(Fabric(name=fabric, hcas=ADAPTERS[fabric], rate_gbps=400.0) for fabric in fabrics),
        ports=PortRange(20000, 20000 + 100 * rng.choice((4, 8, 40)) - 1),
    )


def hca(name: str, fabric: str, number: int) -> Hca:
    return Hca(
        name=name,
        port=1,
        state="ACTIVE",
        phys_state="LinkUp",
        link_layer="InfiniBand",
        rate_gbps=400.0,
        gid=f"{SUBNETS[fabric]}:0000:0000:0000:{number:04x}",
    )


def model(rng: Random, name: str) -> ModelSpec:
    first = profile(rng, "p1")
    others = (profile(rng, "p2"),) if rng.random() < 0.4 else ()
    return ModelSpec(name=name, profiles=(first, *others), replicas=rng.choice((0, 1, 1, 2, 2, 3)))


def profile(rng: Random, name: str) -> Profile:
    nodes = rng.choice((1, 1, 2, 2, 3))
    gpus = rng.choice((0, 1, 1, 2))
    return Profile(
        name=name,
        engine="sim",
        nodes=nodes,
        gpus_per_node=gpus,
        tensor_parallel=max(gpus, 1),
        pipeline_parallel=nodes,
        memory_bytes=rng.choice((4, 16, 24)) * GIB,
        context=2048,
        sim=SimOptions(load_time_s=1.0),
    )


def changed(rng: Random, catalog: Catalog, original: Catalog) -> Catalog:
    """What an operator might write into the file next."""
    models = list(catalog.models)
    what = rng.choice(("context", "context", "broken", "back", "back", "replicas", "alias", "remove", "profile"))
    if what == "back" or not models:
        return original
    at = rng.randrange(len(models))
    spec = models[at]
    if what == "remove":
        del models[at]
    elif what == "replicas":
        models[at] = replace(spec, replicas=rng.choice((0, 1, 2, 3)))
    elif what == "alias":
        models[at] = replace(spec, aliases=() if spec.aliases else (f"{spec.name}-{rng.randrange(9)}",))
    elif what == "profile":
        other = replace(profile(rng, spec.profiles[0].name), engine=spec.profiles[0].engine)
        models[at] = replace(spec, profiles=(other, *spec.profiles[1:]))
    else:
        args = (BROKEN,) if what == "broken" else ()
        first = replace(spec.profiles[0], context=rng.choice((1024, 2048, 4096)), args=args)
        models[at] = replace(spec, profiles=(first, *spec.profiles[1:]))
    return Catalog(models=tuple(models), engines=catalog.engines)


def mended(catalog: Catalog) -> Catalog:
    """The same without what makes engines end at their start."""
    return replace(
        catalog,
        models=tuple(
            replace(spec, profiles=tuple(replace(profile, args=()) for profile in spec.profiles))
            for spec in catalog.models
        ),
    )
