"""Runs on a Slurm cluster: one batch job per run, whose tasks each supervise one node.

The console and the compute nodes share storage at the same paths. Everything that decides about a run is in its folder
there, written by the supervisors outside the sandbox. Slurm contributes where the nodes run, why a job waits, and
evidence of faults of the platform.
"""
