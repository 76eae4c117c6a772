"""Tools beside a training, such as TensorBoard: real programs in sandboxes, which the console's pages lead to.

One process per installation owns them (`owner`), web processes ask it over a Unix socket (`control`). No Django.
"""
