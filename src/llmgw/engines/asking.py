"""How an engine's programs are asked for their whole help, and for their version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmgw.engines.flags import read_help

LIMIT_S = 600.0
"""vLLM and SGLang take some 20 s of a processor to print their help; that was three minutes on a machine at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A command that prints and ends."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """To be added to the environment, for this command alone."""
    limit_s: float = LIMIT_S


def help_questions(engine: str, program: tuple[str, ...]) -> tuple[Question, ...]:
    """In the order in which they are to be asked, until an answer is whole (``whole``).

    ``program`` is what ``Launch.program`` is for this engine.
    """
    if engine != "vllm":
        return (Question(argv=(*program, "--help")),)
    # A plain --help names groups of flags only. Before 0.11.1 --help=all was a search for the word "all", and --help
    # the way to the whole. And where a build for GPUs finds none, it ends before it prints anything, unless it is told
    # what to suppose.
    suppose = {"VLLM_TARGET_DEVICE": "cpu"}
    return (
        Question(argv=(*program, "serve", "--help=all"), env=suppose),
        Question(argv=(*program, "serve", "--help"), env=suppose),
        Question(argv=(*program, "serve", "--help=all")),
    )


def version_question(engine: str, program: tuple[str, ...]) -> Question:
    """What ``Engine.read_version`` reads the answer to; stdout and stderr together."""
    if engine == "sglang":
        # What serves has no --version.
        if program[1:] == ("serve",):
            return Question(argv=(program[0], "version"))
        return Question(argv=(program[0], "-c", _SGLANG_VERSION))
    return Question(argv=(*program, "--version"))


_SGLANG_VERSION = "import sglang.version as found; print('sglang version:', found.__version__)"


def whole(help_text: str) -> bool:
    """Whether it seems to be all of a help: it documents ``--help`` itself, which summaries and searches do not."""
    return read_help(help_text).documents_itself
