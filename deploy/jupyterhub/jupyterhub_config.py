"""A JupyterHub whose users log in with a Trainyard console, which runs and bills their servers.

pip install deploy/jupyterhub
export JUPYTERHUB_CRYPT_KEY=$(openssl rand -hex 32)    # encrypts users' tokens; keep it
jupyterhub -f jupyterhub_config.py
"""

import os

CONSOLE = os.environ.get("TRAINYARD_URL", "https://console.example.com")

c = get_config()  # noqa: F821  # JupyterHub gives it to this file
c.JupyterHub.authenticator_class = "trainyard"
c.JupyterHub.spawner_class = "trainyard"
c.JupyterHub.cleanup_servers = False  # notebooks go on while the hub restarts

c.TrainyardAuthenticator.console_url = CONSOLE
c.TrainyardAuthenticator.client_id = os.environ["OAUTH_CLIENT_ID"]
c.TrainyardAuthenticator.client_secret = os.environ["OAUTH_CLIENT_SECRET"]
c.TrainyardAuthenticator.oauth_callback_url = os.environ.get(
    "OAUTH_CALLBACK_URL", "https://hub.example.com/hub/oauth_callback"
)
c.TrainyardAuthenticator.allowed_organizations = set(os.environ.get("ALLOWED_ORGANIZATIONS", "").split())

c.TrainyardSpawner.profiles = [
    {"name": "Small", "image": "pytorch", "node_spec": "nano", "max_seconds": 4 * 3600, "idle_seconds": 1800},
    {"name": "Large", "image": "pytorch", "node_spec": "small", "max_seconds": 12 * 3600, "idle_seconds": 1800},
]
