"""The launcher: what runs inside the image, on each node, and starts the customer's code on every rank.

It hides torchrun, horovodrun and their kin. Its one rule: the standard library alone, Python 3.8 and later, so that any
image with a Python can carry it, and nothing heavy is imported before the ranks start.
"""
