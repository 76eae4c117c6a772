"""Calls one method of the JupyterHub spawner: python hub_spawner.py CONSOLE_URL METHOD OPTIONS, with options as JSON.

Runs in the environment of JupyterHub. Prints what the method returned and the notebook's number, as a list of JSON.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

from trainyard_jupyterhub.spawner import TrainyardSpawner

PROFILES = [
    {"name": name, "image": "pytorch", "node_spec": "nano", "max_seconds": hours * 3600}
    for name, hours in (("Small", 1), ("Large  size", 12))
]


class Spawner(TrainyardSpawner):
    """A spawner without a hub around it."""

    server = SimpleNamespace(base_url="/user/1/")


async def main() -> None:
    async def get_auth_state() -> dict[str, str]:
        return {"access_token": "t"}

    async def refresh_user(_user: object) -> bool:
        return False  # as if the console restarted meanwhile

    user = SimpleNamespace(name="1", get_auth_state=get_auth_state)
    spawner = Spawner(
        user=user,
        authenticator=SimpleNamespace(refresh_user=refresh_user),
        console_url=sys.argv[1],
        profiles=PROFILES,
        redirect_port=0,
    )
    spawner.notebook_id, spawner.user_options = 7, json.loads(sys.argv[3])
    sys.stdout.write(json.dumps([await getattr(spawner, sys.argv[2])(), spawner.notebook_id]))


asyncio.run(main())
