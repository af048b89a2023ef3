"""Getting files onto this node from releases, package indexes, mirrors and folders: whole, checked, or not at all."""
