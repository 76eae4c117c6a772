"""Supervise the nodes of sandboxed runs: what the local and the Slurm backend share. It knows neither of them."""
