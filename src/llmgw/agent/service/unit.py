"""The text of the agent's unit. Pure."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

MARK = "# Written by `llmgw agent install`"
"""How the file begins that is ours to overwrite and to remove."""

_TEXT = """\
{mark}, and written anew by it: put changes into a drop-in, with `systemctl edit llmgw-agent`.

[Unit]
Description=llmgw agent
Wants=network-online.target
After=network-online.target
# However often it ends, it is started again: a node that gave up would be cut off until somebody came.
StartLimitIntervalSec=0

[Service]
# The agent says when it has adopted the engines that run and begins to dial. That no control plane answers then does
# not keep the unit from being started.
Type=notify
NotifyAccess=main
ExecStart={binary} agent --config {config}
# A first look at a large machine, through drivers that take their time.
TimeoutStartSec=300
Restart=on-failure
RestartSec=2s
# A hang-up would count as a good end. Whoever sends one wants its file read again: it is started anew.
RestartForceExitStatus=SIGHUP
# The agent's event loop gives signs of life, while it and the thread of its stream make progress. Without them it is
# killed (where its threads stood goes to the journal) and started anew, and adopts its engines.
WatchdogSec=60
TimeoutAbortSec=10
# It leaves its engines running, and says goodbye to the control plane.
TimeoutStopSec=30
# Engines have units of their own. Nothing but the agent itself is killed with this one.
KillMode=process
StateDirectory=llmgw-agent
LimitNOFILE=1048576
# A dump of its memory would hold keys.
LimitCORE=0

# The agent is root: it installs packages, makes a user for engines, starts their units and sets packet filters. None
# of what follows keeps somebody out who has taken it over; it makes accidents, and what the agent starts within this
# unit (package managers, downloads, engines on trial), a little smaller. Engines' own units inherit none of it.
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
CapabilityBoundingSet=~CAP_SYS_BOOT CAP_SYS_TIME CAP_WAKE_ALARM CAP_SYS_PACCT
UMask=0022
# What one might miss here, and why it is:
# - ProtectSystem: engines need packages of the system, which are written to /usr and /etc.
# - PrivateTmp, ProtectHome, ProtectKernelTunables, ProtectControlGroups, ReadWritePaths: each gives the agent a mount
#   table of its own. Paths in its file (model_dirs, say) have to mean the same to it, to the engines' units and to
#   whoever writes them; and containers that may not nest can't start such a unit at all.
# - PrivateDevices, DeviceAllow, ProtectClock (which implies it): engines are tried on the machine's GPUs, whose device
#   files come with the driver.
# - ProtectKernelModules, CAP_SYS_MODULE, CAP_MKNOD: the first look at an NVIDIA GPU may load its driver.
# - ProtectKernelLogs: the kernel's log says which engine was killed for lack of memory.
# - ProtectProc, ProcSubset: engines are found again in /proc.
# - PrivateNetwork, IPAddressDeny: control planes, weights and packages are where the operator says.
# - PrivateUsers, User, an empty CapabilityBoundingSet: engines run as a user of their own, which only root can become.
# - ProtectHostname: a machine that is renamed is to show it.
# - RestrictNamespaces: what an engine on trial may not see is hidden from it by a mount table of its own.
# - RestrictSUIDSGID: packages of the system may bring such files.
# - MemoryDenyWriteExecute, SystemCallFilter: engines on trial compile code, and are anybody's programs.

[Install]
WantedBy=multi-user.target
"""


def unit(binary: Path, config: Path) -> str:
    """The unit that runs ``binary`` as the agent of ``config``; both are absolute paths."""
    return _TEXT.format(mark=MARK, binary=_word(binary), config=_word(config))


def config_of(text: str) -> Path | None:
    """Which agent's file a unit's text names; None where it names none."""
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "ExecStart":
            try:
                words = shlex.split(value)
            except ValueError:
                return None
            named = [after for word, after in pairwise(words) if word in ("--config", "-c")]
            return Path(named[-1].replace("%%", "%").replace("$$", "$")) if named else None
    return None


def _word(path: Path) -> str:
    """As one word of ExecStart: systemd expands % and $, and takes quotes and backslashes (systemd.service(5))."""
    text = str(path).replace("%", "%%").replace("$", "$$")
    if any(character in text for character in " \t\"'\\;"):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text
