"""The agent as a service of systemd: its unit, and how that is put in place (``install``) and taken away
(``uninstall``, both modules of that name: what they need is imported only by who needs them)."""

from llmgw.agent.service.systemd import UNIT, UNIT_FILE, ServiceRefused
from llmgw.agent.service.unit import config_of, unit

__all__ = ["UNIT", "UNIT_FILE", "ServiceRefused", "config_of", "unit"]
