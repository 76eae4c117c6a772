"""Built-in images as virtual environments, for local runs and Slurm: recipes, wheels, and the builder."""
