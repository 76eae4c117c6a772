"""Supervise the nodes of sandboxed runs. The local and the Slurm backend share this package, which imports neither."""
