"""What must not be forgotten: one Store in domain verbs, with SQLite and memory behind it."""
