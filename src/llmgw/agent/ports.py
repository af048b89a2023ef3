"""Is a port free, and if not, who has it?"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from llmgw.process.ports import port_holder


def taken(host: str, port: int, root: Path = Path("/proc")) -> str | None:
    """None: the port can be bound. Else who holds it, in words: "port 20000 is taken by pid 812 (nginx)".

    Raises OSError where another port of this address would do no better: the address is not this machine's, say.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return f"port {port} is taken by {port_holder(port, root) or 'a process that the agent can not see'}"
    return None
