"""llmgw's gateway against nginx on the same machine, in the same run.

    python benchmarks/gateway/run.py [--rounds 5] [--seconds 4] [--only json,streams,memory]

Each subject gets one core to itself (core 0); the engine and the load generator share the other (core 1). Rounds are
interleaved and medians are taken, so that whatever else the machine does falls on all subjects alike, and a measurement
in which others held the subject's core is repeated. Absolute figures move from run to run; rows of one run compare.
``direct`` is the load generator on the engine without anything between.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.cluster.model import Endpoint, Route
from llmgw.gateway.table import TableFile
from llmgw.link.messages import Routes, RoutesKey
from llmgw.version import VERSION

HERE = Path(__file__).parent
SUBJECT_CORE, LOAD_CORE = 0, 1
REPLICAS = 4
STREAMS, CHUNK_EVERY_MS = 400, 10
WANTED_CHUNKS_S = STREAMS * 1000 / CHUNK_EVERY_MS
MEMORY_STREAMS = 2_000
KEY = "sk-test-key-0001"
START_S = 30.0
WARM_UP_S = 0.5
TRIES, DISTURBED = 4, 0.05
"""A measurement in which the subject waited for its core for more than this share is repeated."""

GATEWAY = """
import sys
from pathlib import Path
from llmgw.gateway.main import run
from llmgw.gateway.settings import GatewaySettings
sys.exit(run(GatewaySettings(id="bench", state_dir=Path(sys.argv[1]), listen_host="127.0.0.1",
                             listen_port=int(sys.argv[2]), metrics_port=0, drain_s=0.0)))
"""

NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
worker_rlimit_nofile 60000;
events {{ worker_connections 20000; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 100000000;
  upstream engines {{ least_conn; {servers} keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s; client_max_body_size 256m; tcp_nodelay on;
    }}
  }}
}}
"""


@dataclass
class Subject:
    """Something that is measured. ``pid`` is of the process that does the work; 0: none."""

    name: str
    port: int
    ports: int = 1
    pid: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, what: str, value: float) -> None:
        self.figures.setdefault(what, []).append(value)

    def median(self, what: str) -> float | None:
        values = self.figures.get(what)
        return statistics.median(values) if values else None

    def ran_and_waited_s(self) -> tuple[float, float]:
        """What its thread has run, and what it has waited for its core while it could have run."""
        if not self.pid:
            return 0.0, 0.0
        ran, waited, _ = Path(f"/proc/{self.pid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9

    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Bench:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.engine_port = free_ports(REPLICAS)
        self.stack = contextlib.ExitStack()

    def build(self) -> None:
        for name, libraries in (("engine", ()), ("load", ("-lssl", "-lcrypto"))):
            command = ["cc", "-O2", "-w", "-o", str(self.folder / name), str(HERE / f"{name}.c"), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed (a C compiler and OpenSSL's headers are needed):\n{done.stderr}")

    def engine(self) -> None:
        command = [str(self.folder / "engine"), "-p", str(self.engine_port), "-n", str(REPLICAS)]
        self.stack.enter_context(running(command, LOAD_CORE))
        wait_for(self.engine_port)

    def nginx(self) -> Subject | None:
        binary = shutil.which("nginx") or next(iter(map(str, Path("/usr/sbin").glob("nginx"))), None)
        if binary is None:
            print("nginx is not installed (apt-get install nginx-light): its rows are left out", file=sys.stderr)
            return None
        port = free_ports(1)
        servers = " ".join(f"server 127.0.0.1:{self.engine_port + n};" for n in range(REPLICAS))
        config = self.folder / "nginx.conf"
        config.write_text(NGINX.format(folder=self.folder, servers=servers, port=port))
        child = self.stack.enter_context(running([binary, "-c", str(config)], SUBJECT_CORE))
        wait_for(port)
        worker = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])
        return Subject("nginx", port, pid=worker)

    def gateway(self) -> Subject:
        endpoints = tuple(
            Endpoint(
                replica=f"m1-{n}", generation=1, url=f"http://127.0.0.1:{self.engine_port + n}", api_key="engine-key"
            )
            for n in range(REPLICAS)
        )
        known = RoutesKey(id="bench", hash=hashlib.sha256(KEY.encode()).hexdigest())
        frame = Routes(epoch=1, session=1, version=1, routes=(Route(model="m1", endpoints=endpoints),), keys=(known,))
        TableFile(self.folder / "gateway").save(frame, time.time())
        port = free_ports(1)
        command = [sys.executable, "-c", GATEWAY, str(self.folder / "gateway"), str(port)]
        child = self.stack.enter_context(running(command, SUBJECT_CORE))
        wait_for(port)
        return Subject("llmgw", port, pid=child.pid)

    def load(self, subject: Subject, *options: str, seconds: float | None = None) -> dict[str, float]:
        command = [
            *("taskset", "-c", str(LOAD_CORE), str(self.folder / "load"), "-p", str(subject.port), "-k", KEY),
            *("-P", str(subject.ports), "-d", str(seconds or self.seconds), "-w", str(WARM_UP_S), *options),
        ]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        said: dict[str, float] = json.loads(out)
        if said["err"]:
            sys.exit(f"{subject.name}: {said['err']:.0f} errors, the first: {said['first_err']}")
        return said

    def undisturbed(self, subject: Subject, *options: str) -> tuple[dict[str, float], float]:
        """What the load saw, and the CPU seconds of the subject: of the first try in which others left it its core.

        Of TRIES disturbed ones, the least disturbed.
        """
        tries: list[tuple[float, dict[str, float], float]] = []
        while len(tries) < TRIES and (not tries or tries[-1][0] > DISTURBED):
            ran, waited = subject.ran_and_waited_s()
            said = self.load(subject, *options)
            ran, waited = (
                after - before for after, before in zip(subject.ran_and_waited_s(), (ran, waited), strict=True)
            )
            tries.append((waited / (ran + waited) if ran else 0.0, said, ran))
        share, said, ran = min(tries, key=lambda each: each[0])
        subject.note("waited", share)
        return said, ran

    def measure_json(self, subject: Subject) -> None:
        for connections in (1, 64):
            said, ran = self.undisturbed(subject, "-c", str(connections), "-m", "fake-json", "-b", "1024", "-S", "0")
            subject.note(f"json{connections}", said["rps"])
            subject.note(f"json{connections}_p99", said["lat_p99"])
            # The warm-up is not in the count of requests: scale it in.
            requests = said["n"] * (self.seconds + WARM_UP_S) / self.seconds
            subject.note(f"json{connections}_cpu", ran / requests * 1e6)

    def measure_streams(self, subject: Subject) -> None:
        # Streams start spread over a second, which comes before the warm-up: half of it counts.
        said, ran = self.undisturbed(subject, "-c", str(STREAMS), "-m", f"fake-s200-d{CHUNK_EVERY_MS}", "-S", "1000")
        subject.note("chunks", said["chunks_s"])
        subject.note("chunks_p99", said["cd_p99"] / 1000)
        chunks = said["nchunk"] * (self.seconds + WARM_UP_S + 0.5) / self.seconds
        subject.note("chunks_cpu", ran / chunks * 1e6)

    def measure_memory(self, subject: Subject) -> None:
        if not subject.pid:
            return
        before = subject.memory_bytes()
        command = [
            *("taskset", "-c", str(LOAD_CORE), str(self.folder / "load"), "-p", str(subject.port), "-k", KEY),
            *("-c", str(MEMORY_STREAMS), "-d", "60", "-m", "fake-s1000-d1000", "-S", "2000"),
        ]
        with running(command, None):
            stats = f"http://127.0.0.1:{self.engine_port}/stats"
            deadline = time.monotonic() + START_S
            while json.load(urllib.request.urlopen(stats))["open"] < MEMORY_STREAMS:
                if time.monotonic() > deadline:
                    sys.exit(f"{subject.name}: {MEMORY_STREAMS} streams were not open within {START_S:g} s")
                time.sleep(0.1)
            time.sleep(2.0)
            subject.note("memory", (subject.memory_bytes() - before) / MEMORY_STREAMS / 1024)


@contextlib.contextmanager
def running(command: list[str], core: int | None) -> Iterator[subprocess.Popen[bytes]]:
    pinned = command if core is None else ["taskset", "-c", str(core), *command]
    child = subprocess.Popen(pinned, stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_ports(count: int) -> int:
    """The first of that many free ports in a row."""
    for first in range(21000, 29000, 10):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise SystemExit("no free ports between 21000 and 29000")


def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                sys.exit(f"nothing listens on port {port} after {START_S:g} s")
            time.sleep(0.05)


ROWS = (
    ("json1", "JSON 1 KB, c = 1 (requests/s)", "{:,.0f}", False),
    ("json64", "JSON 1 KB, c = 64 (requests/s)", "{:,.0f}", False),
    ("json64_p99", "JSON 1 KB, c = 64, p99 (µs)", "{:,.0f}", True),
    ("json64_cpu", "CPU per request, c = 64 (µs)", "{:,.1f}", True),
    (
        "chunks",
        f"{STREAMS} streams x {1000 / CHUNK_EVERY_MS:.0f} chunks/s ({WANTED_CHUNKS_S:,.0f} wanted)",
        "{:,.0f}",
        False,
    ),
    ("chunks_p99", "p99 delay of a chunk (ms)", "{:,.1f}", True),
    ("chunks_cpu", "CPU per chunk (µs)", "{:,.1f}", True),
    ("waited", "share of its time that others held its core", "{:.0%}", True),
    ("memory", f"memory per open stream, {MEMORY_STREAMS:,} streams (KB)", "{:,.1f}", True),
)


def report(subjects: list[Subject]) -> str:
    names = [subject.name for subject in subjects]
    against = next((subject for subject in subjects if subject.name == "nginx"), None)
    ours = next(subject for subject in subjects if subject.name == "llmgw")
    lines = ["| one core | " + " | ".join(names) + " | llmgw / nginx |", "| --- |" + " --- |" * (len(names) + 1)]
    for what, title, form, _ in ROWS:
        cells = [
            subject.median(what) if subject.pid or not what.endswith(("cpu", "waited")) else None
            for subject in subjects
        ]
        if all(cell is None for cell in cells):
            continue
        mine, theirs = ours.median(what), against.median(what) if against else None
        ratio = f"{mine / theirs:.2f}" if mine is not None and theirs and what != "waited" else "–"
        shown = ["–" if cell is None else form.format(cell) for cell in cells]
        lines.append(f"| {title} | " + " | ".join(shown) + f" | {ratio} |")
    return "\n".join(lines)


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    system = f"Linux {platform.release()}, Python {platform.python_version()}, llmgw {VERSION}"
    return f"{model}, {os.cpu_count()} cores, {system}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement, after a second of warm-up")
    parser.add_argument("--only", default="json,streams,memory")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed: one for the subject, one for the engine and the load")
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name:
        bench = Bench(Path(name), options.seconds)
        bench.build()
        with bench.stack:
            bench.engine()
            nginx = bench.nginx()
            subjects = [
                Subject("direct", bench.engine_port, ports=REPLICAS),
                *([nginx] if nginx else []),
                bench.gateway(),
            ]
            for number in range(options.rounds):
                for kind in options.only.split(","):
                    for subject in subjects:
                        if kind == "memory" and number:
                            continue
                        getattr(bench, f"measure_{kind}")(subject)
                print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
            print(
                f"{machine()}, load average {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}\n\n{report(subjects)}"
            )


if __name__ == "__main__":
    main()
