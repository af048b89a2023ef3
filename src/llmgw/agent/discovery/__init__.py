"""What a machine is: found out, with what the operator stated taken over it."""

from llmgw.agent.discovery.discover import discover, links_changed
from llmgw.agent.discovery.settings import DiscoveryRefused, DiscoverySettings, settings_of
from llmgw.agent.discovery.system import OsRelease, boot_id, machine_fingerprint, read_os_release
from llmgw.agent.discovery.vitals import read_vitals

__all__ = [
    "DiscoveryRefused",
    "DiscoverySettings",
    "OsRelease",
    "boot_id",
    "discover",
    "links_changed",
    "machine_fingerprint",
    "read_os_release",
    "read_vitals",
    "settings_of",
]
