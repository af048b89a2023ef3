"""Installing engines on this node, and proving that they work. Start at ``installer``; docs/design.md has the map."""

from llmgw.agent.install.installer import Installer
from llmgw.agent.install.program import Program

__all__ = ["Installer", "Program"]
