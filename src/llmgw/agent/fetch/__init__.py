"""Getting files from the Python package index onto this node: whole, checked, or not at all."""
