"""What people type: arguments, tables and exit codes, and nothing else."""

from llmgw.cli.app import main

__all__ = ["main"]
