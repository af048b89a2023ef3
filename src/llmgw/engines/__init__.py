"""What each engine is: command lines, environment, health, how its help and version are read. Pure: no I/O."""
