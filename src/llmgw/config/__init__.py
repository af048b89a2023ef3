"""The two files that operators write, read strictly: ``server.yaml`` and ``agent.yaml``."""

from llmgw.config.addresses import HostPort
from llmgw.config.agent import AgentConfig
from llmgw.config.faults import ConfigError, Fault
from llmgw.config.load import load_agent, load_server, parse_agent, parse_server
from llmgw.config.reload import restart_needed
from llmgw.config.server import ServerConfig

__all__ = [
    "AgentConfig",
    "ConfigError",
    "Fault",
    "HostPort",
    "ServerConfig",
    "load_agent",
    "load_server",
    "parse_agent",
    "parse_server",
    "restart_needed",
]
