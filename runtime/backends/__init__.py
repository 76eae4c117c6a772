"""The backends behind one protocol; see `base`."""
