"""Management commands of storage."""
