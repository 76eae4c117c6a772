"""Tools for looking at training, such as TensorBoard. They run in sandboxes, and the console's pages link to them.

One process per installation, the owner, starts and ends all tools (`owner`). Web processes ask it for a session over a
Unix socket (`control`). Imports no Django.
"""
