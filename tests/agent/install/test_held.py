"""What package commands print where another one holds a lock, and what looks like it and is something else."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from llmgw.agent.install.held import Held, held_in_apt, held_in_dnf, holder

UNATTENDED = Held(file="/var/lib/dpkg/lock-frontend", pid=812, name="unattended-upgr")

# Printed by apt 2.6.1 and dpkg 1.21.22, those without a pid by older ones.
APT = [
    (
        "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 812 (apt-get)\n"
        "E: Unable to lock directory /var/lib/apt/lists/\n",
        Held(file="/var/lib/apt/lists/lock", pid=812, name="apt-get"),
    ),
    (
        "Reading package lists...\nBuilding dependency tree...\n"
        "E: Could not get lock /var/cache/apt/archives/lock. It is held by process 812 (apt-get)\n"
        "E: Unable to lock directory /var/cache/apt/archives/\n",
        Held(file="/var/cache/apt/archives/lock", pid=812, name="apt-get"),
    ),
    (
        "Waiting for cache lock: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 812 "
        "(unattended-upgr)...",
        UNATTENDED,
    ),
    (
        "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 812 (unattended-upgr)\n"
        "N: Be aware that removing the lock file is not a solution and may break your system.\n"
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?\n",
        UNATTENDED,
    ),
    (
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?\n",
        Held(file="/var/lib/dpkg/lock-frontend"),
    ),
    (
        "E: Unable to lock the administration directory (/var/lib/dpkg/), is another process using it?\n",
        Held(file="/var/lib/dpkg/lock"),
    ),
    (
        "E: Could not get lock /var/lib/dpkg/lock-frontend - open (11: Resource temporarily unavailable)\n"
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?\n",
        Held(file="/var/lib/dpkg/lock-frontend"),
    ),
    (
        "E: Could not get lock /var/lib/apt/lists/lock - open (11: Resource temporarily unavailable)\n"
        "E: Unable to lock directory /var/lib/apt/lists/\n",
        Held(file="/var/lib/apt/lists/lock"),
    ),
    (
        "dpkg: error: dpkg frontend lock was locked by another process with pid 812\n"
        "Note: removing the lock file is always wrong, can damage the locked area\n",
        Held(pid=812),
    ),
    ("dpkg: error: dpkg status database is locked by another process\n", Held()),
    (
        'debconf: DbDriver "config": /var/cache/debconf/config.dat is locked by another process: '
        "Resource temporarily unavailable\n",
        Held(file="/var/cache/debconf/config.dat"),
    ),
]

NO_LOCK = [
    "E: Could not open lock file /var/lib/dpkg/lock-frontend - open (13: Permission denied)\n"
    "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), are you root?\n",
    "E: Could not open lock file /var/lib/apt/lists/lock - open (13: Permission denied)\n"
    "E: Unable to lock directory /var/lib/apt/lists/\n",
    "E: Unable to locate package libgomp99\n",
    "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem. \n",
    "E: Failed to fetch http://mirror.example/debian/pool/main/g/gcc-12/libgomp1_12.2.0-14_amd64.deb  404  Not Found\n",
    "E: You don't have enough free space in /var/cache/apt/archives/.\n",
    "",
]

# Printed by dnf 4, dnf 5, rpm and yum.
DNF = [
    ("Waiting for process with pid 812 to finish.\n", Held(pid=812)),
    ("Error: Failed to download metadata: metadata already locked by 812\n", Held(pid=812)),
    (
        "error: can't create transaction lock on /nonexistent/.rpm.lock (Resource temporarily unavailable)\n",
        Held(file="/nonexistent/.rpm.lock"),
    ),
    (
        "Running transaction\n"
        "Transaction failed: Failed to obtain rpm transaction lock. Another transaction is in progress.\n",
        Held(),
    ),
    ("Failed to obtain the transaction lock (logged in as: root).\nError: Could not run transaction.\n", Held()),
    ("Another app is currently holding the yum lock; waiting for it to exit...\n", Held()),
]


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes and locks of this very machine say nothing about texts of others."""
    monkeypatch.setattr("llmgw.agent.install.held._command", lambda pid: None)
    monkeypatch.setattr("llmgw.agent.install.held.holder", lambda lock: None)


@pytest.mark.parametrize(("text", "held"), APT)
def test_locks_in_the_words_of_apt_and_dpkg(text: str, held: Held) -> None:
    assert held_in_apt(text) == held


@pytest.mark.parametrize("text", NO_LOCK)
def test_what_no_waiting_helps(text: str) -> None:
    assert held_in_apt(text) is None


@pytest.mark.parametrize(("text", "held"), DNF)
def test_locks_in_the_words_of_dnf(text: str, held: Held) -> None:
    assert held_in_dnf(text) == held


def test_other_words_of_dnf_are_no_lock() -> None:
    assert held_in_dnf("Error: Unable to find a match: libgomp99\n") is None
    assert held_in_dnf("error: can't create transaction lock on /var/lib/rpm/.rpm.lock (Permission denied)\n") is None


def test_a_holder_in_words() -> None:
    assert str(UNATTENDED) == "held by unattended-upgr, pid 812"
    assert str(Held(pid=812)) == "held by pid 812"
    assert str(Held(file="/var/lib/dpkg/lock")) == "/var/lib/dpkg/lock is locked"
    assert str(Held()) == "who holds the lock is not known"


def test_the_kernel_says_who_holds_a_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    assert holder(lock) is None
    with lock.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert holder(lock) == os.getpid()
    assert holder(lock) is None
    assert holder(tmp_path / "none") is None
