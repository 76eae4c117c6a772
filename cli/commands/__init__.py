"""The commands, with a module for each kind of object.

In the columns of their tables, a name that ends with `#` is aligned to the right (`Screen.table`).
"""
