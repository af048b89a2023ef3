"""The nouns: nodes and what they have, replicas and their shards. Frozen; a change is a new value.

Sizes are bytes, durations seconds. ``*_at`` and ``since`` are wall-clock Unix times for people to read;
``heard_at_s`` is the control plane's own monotonic clock, the only one by which liveness is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from llmgw.cluster.catalog import Catalog, EngineName, EngineSpec, ModelSpec, Profile, Task


class NodeState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    DRAINING = "draining"
    DRAINED = "drained"
    REVOKED = "revoked"


class ReplicaState(StrEnum):
    UNPLACED = "unplaced"
    PLACING = "placing"
    PREPARING = "preparing"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


class ShardState(StrEnum):
    WANTED = "wanted"
    PREPARING = "preparing"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class DrainState(StrEnum):
    WAITING = "waiting"
    """Something can't be moved yet, and whoever asked chose to wait; the originals serve on."""
    MOVING = "moving"
    DONE = "done"
    """Nothing is left on the node. Stays until it is taken back."""


class MoveState(StrEnum):
    PENDING = "pending"
    STARTING = "starting"
    """The replacement is placed and not ready yet."""
    SHIFTING = "shifting"
    """The replacement is ready; gateways are taking up the table without the original."""
    FINISHING = "finishing"
    """No gateway sends the original anything new; its requests in flight are waited for."""
    STOPPING = "stopping"
    MOVED = "moved"
    BLOCKED = "blocked"
    """It can't go on for now; ``why`` says what is short."""


class EngineState(StrEnum):
    WANTED = "wanted"
    RESOLVING = "resolving"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    UNPACKING = "unpacking"
    OS_PACKAGES = "os-packages"
    PROVING = "proving"
    INSTALLED = "installed"
    WAITING = "waiting"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in time on both clocks: ``wall_s`` for people, ``monotonic_s`` for judging silence and stalls."""

    wall_s: float
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    """None: the driver does not say (never read as 0)."""
    memory_shared: bool = False
    """True where the GPU uses the machine's own memory (unified memory)."""
    nvlink_group: int | None = None
    numa_node: int | None = None
    problem: str | None = None
    """Why this GPU can't be used ("GPU is lost"), in the driver's words; None: usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hca:
    """One port of an InfiniBand (or RoCE) adapter."""

    name: str
    port: int
    state: str
    """As the kernel names it: ACTIVE, DOWN, INIT, ARMED, ACTIVE_DEFER; "unknown" where it can't be read."""
    phys_state: str = "unknown"
    link_layer: str = "unknown"
    rate_gbps: float | None = None
    gid: str | None = None
    numa_node: int | None = None
    problem: str | None = None

    @property
    def usable(self) -> bool:
        """A state that can't be read proves nothing, and is taken on trust; discovery warns about it."""
        return self.state in ("ACTIVE", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    name: str
    hcas: tuple[str, ...]
    rate_gbps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    model: str
    architecture: str
    """As ``uname -m`` prints it: x86_64, aarch64."""
    cores: int
    extensions: tuple[str, ...] = ()
    """The vector extensions that engines care about, as /proc/cpuinfo names them: avx2, fma, f16c, avx512f, asimd."""


@dataclass(frozen=True, slots=True)
class PortRange:
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a machine is. Changes rarely; sent whole when it does."""

    hostname: str
    os: str
    kernel: str
    libc: str
    """Such as "glibc 2.36"."""
    cpu: Cpu
    memory_bytes: int
    mgmt_addr: str
    mgmt_interface: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_source: str = "none"
    """nvml, nvidia-smi, or none."""
    driver: str | None = None
    hcas: tuple[Hca, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: PortRange = PortRange(20000, 29999)
    launch_modes: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy an engine is, under the same names whichever it is. None: the engine does not tell."""

    running: float | None = None
    """Requests that it works on."""
    waiting: float | None = None
    """Requests that it has taken and not begun."""
    kv_used_ratio: float | None = None
    """Part of its cache of keys and values that is taken: 0 to 1."""
    prompt_tokens_total: float | None = None
    """Counted since the engine started, as is the next."""
    generation_tokens_total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What moves: part of every heartbeat."""

    memory_bytes: int
    memory_available_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    load_1m: float = 0.0
    loads: Mapping[str, Load] = field(default_factory=dict)
    """By shard id: of those that serve, and whose engine answered when it was last asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOnNode:
    """One version of an engine as a node reports it. ``words`` is what people read: progress, or why not."""

    name: EngineName
    version: str
    state: EngineState
    words: str = ""
    since: float = 0.0
    named: bool = False
    """The agent's file names its program, and nothing is installed: it stands in for every version."""
    failed: str = ""
    """Why the last attempt at having it failed; empty once it is installed. It stays while the next one is made."""

    @property
    def usable(self) -> bool:
        return self.state is EngineState.INSTALLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an engine's process ended. Exactly one of ``status`` and ``signal`` is set, unless nobody saw it end."""

    status: int | None = None
    signal: str | None = None
    oom: bool = False
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.oom:
            return f"killed for lack of memory ({self.signal or 'SIGKILL'})"
        if self.signal is not None:
            return f"killed by {self.signal}"
        return f"exited with status {self.status}" if self.status is not None else "ended unseen"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedShard:
    """A shard as its node reports it. ``id`` is REPLICA/RANK."""

    id: str
    generation: int
    state: ShardState
    since: float
    why: str = ""
    pid: int | None = None
    endpoint: str | None = None
    """host:port of the engine's HTTP server; None for ranks that serve nothing."""
    exit: Exit | None = None
    port_taken: bool = False
    """True where the shard failed because its port was not free: the next generation moves on to another block."""
    prepared: bool = False
    """While preparing: nothing is missing here any more; it starts once all ranks of its generation are as far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: str
    state: NodeState
    since: float
    why: str = ""
    address: str = ""
    agent_version: str = ""
    session: int | None = None
    """Epoch of the session that is open; None while there is none."""
    heard_at_s: float = 0.0
    """Monotonic time of the last message, on the control plane's clock. 0: none since this control plane started."""
    caught_up: bool = True
    """False from the moment a changed desired state is sent until the node says that it has taken it up.
    In between, a shard that it does not report may still come, so its absence proves nothing."""
    silent: bool = False
    """True where it is to be emptied, which its state tells, and would be suspect otherwise."""
    inventory: Inventory | None = None
    vitals: Vitals | None = None
    probed: bool = False
    """The agent has said which engines it has. Until then it is no candidate."""
    engines: tuple[EngineOnNode, ...] = ()
    shards: tuple[ObservedShard, ...] = ()
    weights: tuple[str, ...] = ()
    """Sources that the node holds whole."""

    def engine(self, name: str, version: str = "") -> EngineOnNode | None:
        """The engine as the node has it at that version, or by a program of the node's own, which stands in for every
        version; without a version whichever it has, rather one that can be used."""
        found = None
        for engine in self.engines:
            if engine.name == name and (not version or engine.named or engine.version == version):
                if engine.usable:
                    return engine
                found = found or engine
        return found

    def shard(self, shard_id: str) -> ObservedShard | None:
        return next((shard for shard in self.shards if shard.id == shard_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one rank of a replica runs, and what it holds there."""

    node: str
    gpus: tuple[int, ...] = ()
    """Indices, for people; ``gpu_uuids`` is what is passed on, since indices change at a reboot."""
    gpu_uuids: tuple[str, ...] = ()
    memory_bytes: int = 0
    port: int = 0
    """First of the block of PORT_BLOCK ports that the shard may use."""
    address: str = ""
    """The node's management address when it was placed: where the other ranks and the gateway find it."""


PORT_BLOCK = 100
DIST_INIT_OFFSET = 50
"""Where in the leader's block its ranks meet: engines count upwards from the first port, and from this one."""


@dataclass(frozen=True, slots=True)
class StoryLine:
    at: float
    generation: int
    state: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One running copy of a model. ``placements[rank]`` is where that rank runs, and what is not free because of it.

    A failed replica has placements until its generation is seen to have ended, an unplaced one has none,
    unless it is ``lost`` and comes from the store of an older release.
    """

    id: str
    model: str
    state: ReplicaState
    since: float
    why: str = ""
    generation: int = 0
    profile: Profile | None = None
    """The profile as it was when this generation was placed, so that a changed file does not change what runs."""
    spec: ModelSpec | None = None
    """The model as it was when this generation was placed (its source, task and aliases)."""
    placements: tuple[Placement, ...] = ()
    restarts: int = 0
    """Generations that ended by themselves, ever."""
    failures: int = 0
    """Failures in a row since it was last ready for long; decides the backoff. Ports that are taken are one of them
    each time that all have been tried."""
    failed_on: Mapping[str, int] = field(default_factory=dict)
    """By node, of how many of those failures it was a part: any node of a generation may be to blame for its end. Ports
    that are taken are no fault of a node's as long as there are others."""
    retry_at: float | None = None
    """Wall-clock time before which no new generation is placed."""
    number: int = 0
    """The how-manieth replica of its model this is, from 1: the highest is the youngest."""
    endpoint: str | None = None
    """host:port of rank 0 while ready; kept here so that a restarted control plane routes before the nodes are back."""
    lost: bool = False
    """True where the generation was not seen to end: its node is lost. Taken up again if the node returns with it."""
    previous: tuple[Placement, ...] = ()
    """Placements of the last generation once it has ended: the next one prefers the same node."""
    taken_port: int = 0
    """The last block of ports that was found taken since it was last ready for long; the next generation takes one
    above it. 0: none."""
    last_exit: Exit | None = None
    fabric: str | None = None
    """The fabric that its nodes share; None where it runs on one node."""
    dist_init: str | None = None
    """host:port on the leader at which the ranks of this generation meet; None where it runs on one node."""
    replaces: str | None = None
    """Id of the replica that this one takes over from: it counts beside it, not in addition, while that one stands."""
    restart: bool = False
    """An operator asked for it to be replaced by a fresh one."""
    may_stop_first: bool = False
    """And allowed it to stop before there is another, where there is no room for both."""
    not_rolled_to: ModelSpec | None = None
    """A changed catalog whose replacement did not become ready: not tried again until it changes once more."""
    drained_from_s: float = 0.0
    """While draining: monotonic time from which the time is counted that requests in flight may take.
    Belongs to this control plane's clock, and is not stored."""
    drained_by_s: float = 0.0
    """While draining: monotonic time at which requests still in flight are given up. 0: not counted from yet.
    Belongs to this control plane's clock, and is not stored."""
    whole_by_s: float = 0.0
    """While lost, and some of its nodes are back: monotonic time until which the others may follow. 0: none is back.
    Belongs to this control plane's clock, and is not stored."""
    story: tuple[StoryLine, ...] = ()

    def shard_id(self, rank: int) -> str:
        return f"{self.id}/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPeer:
    """A rank as the other ranks of its generation need to know it; in the order of ranks, itself included."""

    node: str
    address: str
    fabrics: tuple[str, ...] = ()
    """Names of all fabrics that its node reports."""
    port: int = 0
    """First of its block of ports; 0: the control plane is too old to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredShard:
    """What a node is asked to run. The agent turns it into a command line with ``llmgw.engines``."""

    id: str
    generation: int
    rank: int
    model: str
    aliases: tuple[str, ...]
    task: Task
    source: str | None
    profile: Profile
    placement: Placement
    api_key: str = field(repr=False)
    """Key that the engine asks for: one per replica, known to the gateway alone."""
    fabric: str | None = None
    dist_init: str | None = None
    peers: tuple[ShardPeer, ...] = ()
    """All ranks; empty where the replica runs on one node."""
    go: bool = True
    """False: prepare (engine, weights, ports) and say so, but start nothing before all ranks can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests at one replica as one gateway counts them. ``finished`` and ``broken`` count since the table without
    the replica was taken up; broken are those that ended in an error after their first byte had been sent on."""

    in_flight: int = 0
    finished: int = 0
    broken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway as the control plane knows it. It lives in memory alone: gateways tell anew."""

    id: str
    connected: bool
    heard_at_s: float
    """Monotonic time of its last word. One that is not connected may send by its last table for a lease longer."""
    may_send: frozenset[str] | None = None
    """Replicas in the table that it acknowledged last, or in one that was sent to it since; None: it has not
    acknowledged one in this session."""
    addresses: tuple[str, ...] = ()
    """From which its requests may come: the one that it last dialled in from, and all others of its machine."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """By replica id: those with requests in flight, and those that left its table a short while ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One replica of a drain: where it goes, or why it can't; then how far it is, and what each phase took."""

    replica: str
    model: str
    state: MoveState = MoveState.PENDING
    why: str = ""
    """For people: what is waited for, or what is short."""
    targets: tuple[str, ...] = ()
    """Nodes that the plan chose, by rank; empty where none could be found."""
    weights_there: bool = True
    downtime: bool = False
    """It is stopped first and placed again after: an operator allowed that for its model."""
    replacement: str | None = None
    failed_on: Mapping[str, int] = field(default_factory=dict)
    """As of a replica, of all its replacements so far: the next one is begun where they have failed least."""
    since: float = 0.0
    """Wall-clock time at which ``state`` began."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What each phase took, by the name of its state."""
    finished: int = 0
    broken: int = 0
    lost: bool = False
    """It was lost with its nodes, and has not been taken up again: another is made in its place without this drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A node that is being emptied. The plan that an operator was shown, and then the report of what became of it."""

    node: str
    since: float
    state: DrainState = DrainState.MOVING
    why: str = ""
    in_flight_s: float | None = None
    """How long requests in flight may take; None: as the control plane's file says."""
    allow_downtime: tuple[str, ...] = ()
    """Models whose replicas may stop before there is another place for them."""
    force: bool = False
    """The same for all of them."""
    wait: bool = False
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """So many nodes fell silent at once that it is rather the network's fault, or ours: none is judged lost."""

    since: float
    silent: tuple[str, ...]
    words: str
    released: bool = False
    """An operator said that the nodes are gone indeed: they are judged as ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHistory:
    """An engine that the file lists, or listed: the build that it names, and those before it that may still be run."""

    name: EngineName
    spec: EngineSpec
    """As the file says."""
    previous: EngineSpec | None = None
    """The build that was in effect before it. Nodes that have it keep it."""
    rolled_back: str = ""
    """Why ``previous`` is in effect in place of ``spec``, for people; empty: it is not."""
    since: float = 0.0
    """Wall-clock time since which what is in effect is."""
    older: tuple[EngineSpec, ...] = ()
    """Builds from before ``previous`` that replicas still ran on when the file changed last."""

    @property
    def in_effect(self) -> EngineSpec:
        return self.previous if self.rolled_back and self.previous is not None else self.spec

    @property
    def kept(self) -> EngineSpec | None:
        """Of the file's build and the one before it the one that is not in effect."""
        return self.spec if self.rolled_back else self.previous

    def build(self, version: str) -> EngineSpec | None:
        """The build of that version, where it is known."""
        known = (self.spec, *((self.previous,) if self.previous is not None else ()), *self.older)
        return next((spec for spec in known if spec.version == version), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A replica that the gateway may send requests to."""

    replica: str
    generation: int
    url: str
    """http://host:port"""
    api_key: str = field(repr=False)
    preferred: bool = True
    """False while the node is suspect: used when nothing better is there."""
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A name that clients may ask for."""

    model: str
    aliases: tuple[str, ...] = ()
    task: Task = "generate"
    endpoints: tuple[Endpoint, ...] = ()
    why_none: str = ""
    """Why there is no endpoint, for the error that the client gets."""
    draining: tuple[str, ...] = ()
    """Ids of replicas that leave in peace: the gateway lets requests at them finish. One that is neither here nor
    among the endpoints is gone, and requests that it has not answered yet go elsewhere at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything a decision is made from."""

    name: str
    catalog: Catalog = field(default_factory=Catalog)
    """The one that is in effect: as the file has it, but for builds of engines that were rolled back, and with the
    version of its engine in each profile."""
    engines: Mapping[str, EngineHistory] = field(default_factory=dict)
    """By the engine's name."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    scale: Mapping[str, int] = field(default_factory=dict)
    """Stored overrides of ``replicas`` (``ctl scale``), by model."""
    replicas_made: Mapping[str, int] = field(default_factory=dict)
    """How many replicas each model ever had: ids are made from it and never reused."""
    secret: str = field(default="", repr=False)
    """Replica keys are derived from it. Made once, at the store's birth."""
    suspect_after_s: float = 15.0
    lost_after_s: float = 30.0
    grace_until_s: float = 0.0
    """Monotonic time before which no node is judged lost."""
    gateways: Mapping[str, Gateway] = field(default_factory=dict)
    drains: Mapping[str, Drain] = field(default_factory=dict)
    """By node id."""
    brake: Brake | None = None
    in_flight_s: float = 600.0
    """How long requests in flight may take when a replica drains."""
    lease_s: float = 30.0
    """How long a gateway that can't be reached may go on sending by the last table it took."""
    tables_settled_at_s: float = 0.0
    """Monotonic time before which a gateway that has not come back yet may still send by an older table: it is one
    lease after this control plane took the lead."""
    halting: bool = False
    """Everything is to be stopped (a cluster of one is going down); nothing new starts."""
