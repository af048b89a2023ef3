"""Runs engines so that they outlive the agent, and finds them again. Restarts nothing: it starts, stops and reports."""

from llmgw.agent.supervisor.engine_user import EngineUser
from llmgw.agent.supervisor.spec import (
    ENGINE,
    LINES_SAID,
    Ended,
    ProcessSpec,
    Running,
    SupervisorError,
    UnknownShard,
    is_check,
    last_lines,
    ready_check,
)
from llmgw.agent.supervisor.supervisor import Supervisor
from llmgw.process.errors import StartError, StopError

__all__ = [
    "ENGINE",
    "LINES_SAID",
    "Ended",
    "EngineUser",
    "ProcessSpec",
    "Running",
    "StartError",
    "StopError",
    "Supervisor",
    "SupervisorError",
    "UnknownShard",
    "is_check",
    "last_lines",
    "ready_check",
]
