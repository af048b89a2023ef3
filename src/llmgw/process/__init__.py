"""Processes that outlive whoever started them. Standard library only; the reaper runs from these very files."""
