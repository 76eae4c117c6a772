"""The console's own commands."""
