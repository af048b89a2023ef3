"""The process that unpacks: ``python -m llmgw.agent.fetch.unpack WISH``, with the archive as its standard input.

WISH is JSON: the arguments of ``archive.extract``. Says on standard output, in a line of JSON each, how far it is
(``done`` and ``total`` bytes) and at the end one of ``unpacked``, ``bad``, ``no_room`` and ``failed``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from llmgw.agent.fetch.archive import BadArchive, Limits, Packing, extract
from llmgw.agent.fetch.disk import NoRoom

_SAY_EVERY_S = 0.25


def say(**words: Any) -> None:
    # One write a line: two threads of it never mix, and nothing is left in a buffer at a sudden end.
    os.write(1, json.dumps(words).encode() + b"\n")


class _Progress:
    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _SAY_EVERY_S
            say(done=done, total=total)


def opened(packing: Packing) -> BinaryIO:
    # Of a pipe a read gives what is there; a zip is read here and there, in small pieces.
    if packing is Packing.ZIP:
        return open(0, "rb", closefd=False)
    return open(0, "rb", 0, closefd=False)


def main(wish: str) -> int:
    asked = json.loads(wish)
    packing = Packing(asked["packing"])
    try:
        with opened(packing) as stream:
            extract(
                packing,
                stream,
                Path(asked["target"]),
                strip=asked["strip"],
                limits=Limits(**asked["limits"]),
                progress=_Progress(),
            )
    except BadArchive as error:
        say(bad=str(error))
    except NoRoom as error:
        say(no_room=str(error))
    except OSError as error:
        say(failed=[error.errno or 0, error.strerror or str(error), str(error.filename or asked["target"])])
    else:
        say(unpacked=True)
        return 0
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the agent, which ends this process
    sys.stdout.flush()
    # A thread may still be reading from the pipe: nothing is waited for.
    os._exit(main(sys.argv[1]))
