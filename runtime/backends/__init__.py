"""The backends, behind the protocol in `base`."""
