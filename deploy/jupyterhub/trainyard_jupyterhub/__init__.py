"""JupyterHub on a Trainyard console: log-in by OpenID Connect, servers as notebooks that the console runs and bills."""
