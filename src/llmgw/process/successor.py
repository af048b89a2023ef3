"""A reaper for a program whose own reaper was killed: it can't be its parent, but all else it does."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

from llmgw.process.attendant import Attendant, open_pipe
from llmgw.process.identity import holders, identify, open_pidfd, send_signal
from llmgw.process.record import ExitRecord, Record, path_of, write_exit, write_record

_TICK_S = 0.05


class Successor(Attendant):
    """Takes the output on, and sees to it that nothing is left. How the program ends only its parent is told, so its
    exit record says that nobody saw it."""

    def __init__(self, record_dir: str | Path, record: Record) -> None:
        super().__init__()
        self._record_dir = record_dir
        self._record = record

    def begin(self) -> None:
        """Take the output on, and go on record as the reaper."""
        record = self._record
        pipe = open_pipe(path_of(self._record_dir, "output"))
        self.take_output(pipe, record.log_path, record.log_limit_bytes, record.logs_kept)
        me = identify(os.getpid(), record.program.nonce)
        write_record(self._record_dir, replace(record, reaper=me))

    def run(self) -> None:
        """Stay until nothing carries the program's nonce any more, and write that it has ended."""
        pidfd = open_pidfd(self._record.program)
        if pidfd is not None:
            self._until_ended(pidfd)
            os.close(pidfd)
        while self._signal_all(signal.SIGKILL):
            self.wait_for_news(_TICK_S)
        lost_bytes = self.finish_output()
        write_exit(self._record_dir, ExitRecord(asked=self.asked, ended_at=time.time(), lost_output_bytes=lost_bytes))

    def _until_ended(self, pidfd: int) -> None:
        told: signal.Signals | None = None
        while not select.select([pidfd], [], [], 0)[0]:
            wanted = signal.SIGKILL if self.kill_now else signal.SIGTERM if self.asked else None
            if wanted is not None and wanted is not told:
                told = wanted
                self._signal_all(wanted)
            self.wait_for_news(None, pidfd)

    def _signal_all(self, number: signal.Signals) -> bool:
        left = holders(self._record.program.nonce)
        for process in left:
            send_signal(process, number)
        return bool(left)
