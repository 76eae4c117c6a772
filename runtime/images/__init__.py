"""Built-in images of the local backend: recipes, wheels, and the builder that turns them into virtual environments."""
