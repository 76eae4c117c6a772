"""Python packages that customers add to an image. They are installed once, in a sandbox, and mounted read-only."""
