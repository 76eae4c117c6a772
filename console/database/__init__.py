"""The database engine of `console.settings`: see `base`."""
