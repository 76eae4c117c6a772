"""The local backend: a supervisor process on this machine for each node of a run."""
