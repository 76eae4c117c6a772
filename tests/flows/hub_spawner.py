"""Calls methods of the JupyterHub spawner: python hub_spawner.py CALLS, with lists of [console's URL, method, options].

Runs in the environment of JupyterHub. Prints what each method returned and the notebook's number, as lists of JSON.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

from trainyard_jupyterhub import spawner as spawner_module
from trainyard_jupyterhub.authenticator import TrainyardAuthenticator
from trainyard_jupyterhub.spawner import TrainyardSpawner

PROFILES = [
    {"name": name, "image": "pytorch", "node_spec": "nano", "max_seconds": hours * 3600}
    for name, hours in (("Small", 1), ("Large  size", 12))
]


class Spawner(TrainyardSpawner):
    """A spawner without a hub around it."""

    server = SimpleNamespace(base_url="/user/1/")

    async def poll_at_times(self) -> list[int | None]:
        """Return the results of polls at the seconds `times` of the monotonic clock."""
        results = []
        for seconds in self.user_options["times"]:
            spawner_module.time = SimpleNamespace(monotonic=lambda seconds=seconds: seconds)
            results.append(await self.poll())
        return results


async def call(url: str, method: str, options: dict[str, str]) -> list[object]:
    async def get_auth_state() -> dict[str, str]:
        return {"access_token": "t", TrainyardAuthenticator.user_auth_state_key: {"sub": "1"}}

    async def refresh_user(_user: object) -> bool:
        return False  # as if the console restarted meanwhile

    user = SimpleNamespace(name="1", get_auth_state=get_auth_state)
    authenticator = SimpleNamespace(refresh_user=refresh_user)
    spawner = Spawner(user=user, authenticator=authenticator, console_url=url, profiles=PROFILES, redirect_port=0)
    spawner.notebook_id, spawner.user_options = 7, options
    return [await getattr(spawner, method)(), spawner.notebook_id]


async def main() -> None:
    sys.stdout.write(json.dumps([await call(*each) for each in json.loads(sys.argv[1])]))


asyncio.run(main())
