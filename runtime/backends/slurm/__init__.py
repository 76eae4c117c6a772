"""Runs on a Slurm cluster: one batch job per run, whose tasks each supervise one node.

The console and the compute nodes share storage at the same paths. A run's folder there holds the records that decide
its outcome; supervisors write them outside the sandbox. Slurm reports where the nodes run, why a job waits, and which
faults of the platform ended a run.
"""
