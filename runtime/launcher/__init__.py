"""The launcher: runs inside the image on each node and starts the customer's code on every rank.

It replaces torchrun, horovodrun and mpirun's agents. It uses the standard library of Python 3.8 and later only, so that
it runs in any image with a Python, and imports little before the ranks start.
"""
