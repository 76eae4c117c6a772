"""The commands, with a module for each kind of object."""
