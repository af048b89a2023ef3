"""Engines as a user of their own, and what that user sees. pytest's own folders are closed to it, as homes are."""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.agent.supervisor import ProcessSpec, StartError, Supervisor
from llmgw.agent.supervisor.engine_user import prepare

from .conftest import Agents, needs_root, shell

pytestmark = needs_root

SHARD = "smol-abcde/0"
USER = "llmgw-engine"


@pytest.fixture
async def supervisor(agents: Agents) -> Supervisor:
    made = await agents.adopted(engine_user=USER)
    assert made.warnings() == ()
    return made


async def output_of(supervisor: Supervisor, spec: ProcessSpec) -> list[str]:
    await supervisor.start(spec)
    exit = await supervisor.wait(spec.shard_id)
    assert exit.status == 0, exit
    return supervisor.tail(spec.shard_id)


def closed(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


async def test_it_runs_as_that_user(supervisor: Supervisor) -> None:
    script = "id -un; id -u; id -g; grep -E 'NoNewPrivs|CapEff' /proc/self/status; umask; stat -c '%U %a' ."
    user = pwd.getpwnam(USER)
    assert await output_of(supervisor, shell(SHARD, 1, script)) == [
        USER,
        str(user.pw_uid),
        str(user.pw_gid),
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
        "0077",
        f"{USER} 700",
    ]


async def test_it_may_use_the_graphics_cards(supervisor: Supervisor) -> None:
    there = {group.gr_name for group in grp.getgrall()} & {"video", "render"}
    (names,) = await output_of(supervisor, shell(SHARD, 1, "id -Gn"))
    assert there <= set(names.split())


async def test_it_reads_its_keys_and_nobody_else_does(supervisor: Supervisor) -> None:
    spec = shell(SHARD, 1, "cat sub/key; stat -c '%U %a' sub/key; touch new", files={"sub/key": "k\n"})
    assert await output_of(supervisor, spec) == ["k", f"{USER} 600"]


async def test_it_reaches_programs_and_weights_below_closed_directories_and_nothing_beside_them(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    home = closed(tmp_path / "home")
    (home / "secret").write_text("of somebody's")
    (home / "models" / "smol").mkdir(parents=True)
    (home / "models" / "smol" / "weights.gguf").write_text("weights")
    (home / "models" / "smol" / "weights.gguf").chmod(0o666)
    (home / "models" / "other").mkdir()
    script = (
        "import json, os\n"
        f"home = {str(home)!r}\n"
        "def refused(path):\n"
        "    try: open(path, 'a').close()\n"
        "    except OSError as error: return error.strerror\n"
        "print(json.dumps({\n"
        "  'weights': open(home + '/models/smol/weights.gguf').read(),\n"
        "  'home': os.listdir(home), 'models': os.listdir(home + '/models'),\n"
        "  'write': [refused(home + '/models/smol/weights.gguf'), refused(home + '/models/new'), refused('here')],\n"
        "}))\n"
    )
    argv = (sys.executable, "-I", "-S", "-c", script)
    reads = (Path(sys.base_prefix), home / "models" / "smol")
    spec = ProcessSpec(shard_id=SHARD, generation=1, argv=argv, reads=reads)
    assert json.loads((await output_of(supervisor, spec))[0]) == {
        "weights": "weights",
        "home": ["models"],
        "models": ["smol"],
        "write": ["Read-only file system", "Read-only file system", None],
    }
    assert (home / "secret").read_text() == "of somebody's"


@pytest.mark.skipif(
    os.access(sys.base_prefix, os.X_OK) and not sys.base_prefix.startswith("/root"), reason="needs a Python below /root"
)
async def test_a_python_of_roots_own(supervisor: Supervisor) -> None:
    spec = ProcessSpec(
        shard_id=SHARD,
        generation=1,
        argv=(sys.executable, "-I", "-c", "import os, ssl, sqlite3; print(os.geteuid(), sorted(os.listdir('/root')))"),
        reads=(Path(sys.prefix), Path(sys.base_prefix)),
    )
    (said,) = await output_of(supervisor, spec)
    top = Path(sys.base_prefix).relative_to("/root").parts[0]
    assert said == f"{pwd.getpwnam(USER).pw_uid} {[top]}"


async def test_links_are_followed_through_closed_directories(supervisor: Supervisor, tmp_path: Path) -> None:
    """As a hub's cache lays weights out: a snapshot of links to blobs elsewhere."""
    blobs, snapshots = closed(tmp_path / "blobs"), closed(tmp_path / "snapshots")
    (blobs / "abc").write_text("weights\n")
    (snapshots / "model.gguf").symlink_to("../blobs/abc")
    (tmp_path / "current").symlink_to(snapshots)
    path = tmp_path / "current" / "model.gguf"
    assert await output_of(supervisor, shell(SHARD, 1, f"cat {path}", reads=(path,))) == ["weights"]


async def test_weights_that_it_may_not_read_are_refused_by_name(supervisor: Supervisor, tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_text("w")
    weights.chmod(0o600)
    with pytest.raises(
        StartError, match=rf"{USER} may not read {weights} \(mode 0600, owner 0:0\); give it read access"
    ):
        await supervisor.start(shell(SHARD, 1, "exit 0", reads=(weights,)))


async def test_weights_that_are_not_there_are_refused_by_name(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("gone.gguf")
    with pytest.raises(StartError, match=r"dangling is needed but can't be reached: .*gone\.gguf: No such file"):
        await supervisor.start(shell(SHARD, 1, "exit 0", reads=(tmp_path / "dangling",)))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StartError, match=r"loop is needed but can't be reached: too many links"):
        await supervisor.start(shell(SHARD, 1, "exit 0", reads=(tmp_path / "loop",)))


async def test_it_may_open_its_output_by_name(supervisor: Supervisor) -> None:
    assert await output_of(supervisor, shell(SHARD, 1, "echo out >/dev/stdout; echo trouble >/dev/stderr")) == [
        "out",
        "trouble",
    ]


async def test_what_the_machine_mounts_is_not_changed(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir(mode=0o755)
    before = Path("/proc/self/mountinfo").read_text()
    assert await output_of(
        supervisor, shell(SHARD, 1, "wc -l </proc/self/mountinfo", reads=(tmp_path / "weights",))
    ) != [str(len(before.splitlines()))]
    assert Path("/proc/self/mountinfo").read_text() == before


async def test_an_engine_of_another_user_is_stopped_and_adopted_like_any(
    supervisor: Supervisor, agents: Agents
) -> None:
    running = await supervisor.start(shell(SHARD, 1, "setsid sleep 600 & exec sleep 600"))
    await supervisor.close()
    second = agents.make(engine_user=USER)
    assert await second.adopt() == (running,)
    assert (await second.stop(SHARD)).signal == "SIGTERM"


def test_a_user_that_can_not_be_made_is_refused_in_words() -> None:
    made = prepare("Not A Name")
    assert made.refusal is not None
    assert "the user Not A Name, which does not exist and could not be made: useradd: invalid user name" in made.refusal
    assert "make it by hand: useradd --system" in made.refusal


async def test_nothing_runs_as_root_because_a_user_is_missing(agents: Agents) -> None:
    supervisor = await agents.adopted(engine_user="Not A Name")
    assert "could not be made" in supervisor.warnings()[0]
    with pytest.raises(StartError, match="which does not exist and could not be made"):
        await supervisor.start(shell(SHARD, 1, "exit 0"))


def test_where_namespaces_are_not_allowed_it_runs_as_the_agents_own_user_and_says_so() -> None:
    script = "from llmgw.agent.supervisor.engine_user import prepare; made = prepare('llmgw-engine'); print(made)"
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "name=None" in said
    assert "engines run as root, not as llmgw-engine: root lacks CAP_SYS_ADMIN here. Give the agent" in said


def test_an_agent_that_is_not_root_runs_engines_as_itself() -> None:
    script = "import os; os.setuid(65534); from llmgw.agent.supervisor.engine_user import prepare; print(prepare('x'))"
    code = f"import sys; sys.path[:0] = {sys.path!r}; import llmgw.agent.supervisor.engine_user\n"
    said = subprocess.run([sys.executable, "-c", code + script], capture_output=True, text=True, check=True).stdout
    assert said == "EngineUser(name=None, warning=None, refusal=None)\n"
