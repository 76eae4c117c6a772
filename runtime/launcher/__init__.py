"""The launcher: runs inside the image on each node and starts the customer's code on every rank.

It replaces torchrun, horovodrun and mpirun's agents. It uses only the standard library of Python 3.8 and later, so it
runs with the Python of any image. Its type hints are `Dict` and `Optional`, since `dict[...]` and `| None` need later
versions. It imports little before the ranks start, so that they start soon.
"""
