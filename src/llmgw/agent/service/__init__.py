"""The agent as a service of systemd: its unit, and how that is put in place and taken away."""

from llmgw.agent.service.install import Installed, install
from llmgw.agent.service.systemd import UNIT, UNIT_FILE, ServiceRefused
from llmgw.agent.service.uninstall import Uninstalled, uninstall
from llmgw.agent.service.unit import config_of, unit

__all__ = [
    "UNIT",
    "UNIT_FILE",
    "Installed",
    "ServiceRefused",
    "Uninstalled",
    "config_of",
    "install",
    "uninstall",
    "unit",
]
