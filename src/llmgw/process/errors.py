"""What can go wrong with a process, by what the reader can do about it."""

from __future__ import annotations


class ProcessError(Exception):
    """Base of everything here. The message is made for people."""


class StartError(ProcessError):
    """The program was not started, and nothing of it is left running."""


class StopError(ProcessError):
    """The program was told to end, was killed, and is still there."""


class RecordError(ProcessError):
    """A file in a record directory can't be understood. Nothing is signalled on its word."""
