"""The launcher: runs inside the image on each node and starts the customer's code on every rank.

It replaces torchrun, horovodrun and mpirun's agents. It uses only the standard library of Python 3.8 and later, so it
runs in any image with a Python. Type hints are therefore in older syntax, such as `List` and `Optional`. The launcher
imports little before the ranks start, so that they start soon.
"""
