"""What should happen next, as pure functions of a snapshot and the time. Standard library only, no I/O, no clock."""
