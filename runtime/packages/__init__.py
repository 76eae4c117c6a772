"""Extra Python packages of a customer's run: installed once on top of an image, in a sandbox, and mounted read-only."""
