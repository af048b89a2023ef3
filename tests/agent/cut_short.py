"""kill -9 between any two things that are done to the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable


def killed_at(step: int, act: Callable[[], object]) -> bool:
    """Does ``act`` in a process that kills itself as it is about to do the ``step``-th thing to the disk.

    Returns whether that came to pass: False where ``act`` was over before.
    """
    child = os.fork()
    if child == 0:
        left = step

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            of_the_disk = event.startswith(("os.", "fcntl.")) or (event == "open" and "identity" in str(arguments[0]))
            if of_the_disk:
                left -= 1
                if left == -1:  # the kill is such an event too
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)
