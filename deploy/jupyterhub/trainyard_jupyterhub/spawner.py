"""A JupyterHub spawner whose servers are notebooks of the console, bought for the user's organization."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.spawner import Spawner
from traitlets import Dict, Integer, List, Unicode, default

from trainyard_jupyterhub.api import NotebooksClient, Refused, money
from trainyard_jupyterhub.authenticator import account_number, organizations
from trainyard_jupyterhub.redirects import REDIRECTS

ENDED = {"succeeded", "failed", "cancelled"}
"""The states of a notebook that has ended."""
POLL_SECONDS = 1.0
"""Interval of requests for the state of a notebook that starts or stops: as often as a person notices a change."""
MAX_AGE = timedelta(days=14)
"""How long ago an open notebook of a user may have been bought. It runs at most 7 days; the other 7 are for waiting for
capacity."""
STOP_SECONDS = 120
"""How long to wait for a stopped notebook's end. It gets 30 seconds to save, and a busy node may need longer."""
MAX_REFUSED_SECONDS = 3600
"""How long the console may refuse the user's log-in before the hub forgets the notebook. The hub cannot tell a log-in
that has ended from a token that was not refreshed because the console restarted, so this is longer than a restart."""
PURCHASE_FIELDS = ("image", "node_spec", "max_seconds", "idle_seconds", "ceiling_minor")
"""The fields of a profile that are sent to the console's API when a notebook is bought."""


class TrainyardSpawner(Spawner):
    """Buys a notebook, waits until it runs, and stops it. Its user reaches it on the console's own address."""

    console_url = Unicode(config=True, help="Address of the console. Default: that of the TrainyardAuthenticator.")
    profiles = List(
        Dict(),
        config=True,
        help="What a user may start. Each is a dict with `name`, `image` and `node_spec`, and optionally "
        "`max_seconds`, `idle_seconds` and `ceiling_minor`, as in the console's API. The first one is the default.",
    )
    workspace = Unicode("main", config=True, help="Workspace that the form proposes.")
    redirect_ip = Unicode("127.0.0.1", config=True, help="Where the hub listens for its proxy, to redirect browsers.")
    redirect_port = Integer(8092, config=True, help="Port at `redirect_ip`. Keep it when the hub restarts.")
    redirect_host = Unicode(config=True, help="Host by which the proxy reaches the hub. Default: `redirect_ip`.")

    notebook_id: int | None = None
    url = ""  # the notebook's address, for its user's browser
    ceiling = ""  # a sentence with the most that the notebook can cost
    _waiting = ""  # a sentence that says what the notebook waits for
    _refused_since: float | None = None  # when the console began to refuse the user's log-in, by the monotonic clock
    _prefix = ""  # the key of this server in `REDIRECTS.targets`

    @default("console_url")
    def _console_url(self) -> str:
        return getattr(self.authenticator, "console_url", "")

    @default("start_timeout")
    def _start_timeout(self) -> int:
        return 900  # a notebook may wait for capacity

    @default("options_form")
    def _options_form(self) -> Any:
        return type(self).form  # the function, not a bound method: JupyterHub calls it with the spawner

    async def form(self) -> str:
        """Return the HTML of the form: the workspace, and organization and profile if there are several."""
        auth_state = await self.user.get_auth_state()
        attributes = f'id="workspace" name="workspace" value="{escape(self.workspace)}" class="form-control" required'
        organization_choices = [(choice["slug"], choice["name"]) for choice in organizations(auth_state)]
        profile_choices = [(str(number), profile["name"]) for number, profile in enumerate(self.profiles)]
        rows = [
            _select("organization", "Organization", organization_choices),
            _select("profile", "Size", profile_choices),
            f'<label for="workspace">Workspace</label><input {attributes}>',
        ]
        return "".join(f'<div class="mb-3">{row}</div>' for row in rows if row)

    def options_from_form(self, form_data: dict[str, list[str]]) -> dict[str, str]:
        """Return the options that a posted form contains."""
        return {name: form_data[name][0] for name in ("organization", "profile", "workspace") if form_data.get(name)}

    async def start(self) -> str:
        """Buy a notebook and wait until it runs. Return the address that redirects to it. Raises Refused.

        If the hub was killed after an earlier purchase for this server, use that notebook and buy no other.
        """
        purchase = self._purchase()
        api = self._api()
        notebook = await self._find_open_notebook(api, purchase) or await self._buy(api, purchase)
        self.notebook_id = notebook["id"]
        while not notebook["url"]:
            if notebook["state"] in ENDED:
                raise Refused(
                    502, f"The notebook ended before it was ready: {notebook['reason'] or notebook['state']}."
                )
            self._waiting = notebook["waiting_for"] or f"The notebook is {notebook['state']}."
            await asyncio.sleep(POLL_SECONDS)
            try:
                notebook = await api.call("GET", f"{self.notebook_id}/")
            except Refused as error:
                # Otherwise the console cannot be reached, answers later, or does not know the log-in yet, for example
                # because it restarts. If this start failed then, the notebook would go on without its user.
                # `start_timeout` limits the wait.
                if error.console_status in {403, 404}:
                    raise
        self.url = notebook["url"]
        self._redirect()
        return f"http://{self.redirect_host or self.redirect_ip}:{self.redirect_port}"

    async def stop(self, now: bool = False) -> None:
        """Stop the notebook and, unless `now`, wait for its end, which settles its charge. Raises Refused."""
        if self.notebook_id is None:
            return
        api, path = self._api(), f"{self.notebook_id}/"
        try:
            await api.call("POST", f"{path}stop/")
            deadline = time.monotonic() + STOP_SECONDS
            while not now and (await api.call("GET", path))["state"] not in ENDED and time.monotonic() < deadline:
                await asyncio.sleep(POLL_SECONDS)
        except Refused as error:
            if error.console_status not in {404, 409}:  # 404: no longer the user's; 409: it has ended already
                raise

    async def poll(self) -> int | None:
        """Return None while the notebook is open, else its exit status.

        If the console refuses the user, for example after they left the organization, the hub forgets the notebook,
        which later ends as idle. While the console cannot be reached, and in the first hour in which it refuses the
        log-in, the notebook counts as open.
        """
        if self.notebook_id is None:
            return 0
        try:
            notebook = await self._api().call("GET", f"{self.notebook_id}/")
        except Refused as error:
            if error.console_status == 401:
                self._refused_since = self._refused_since or time.monotonic()
                is_refused = time.monotonic() - self._refused_since > MAX_REFUSED_SECONDS
            else:
                is_refused = error.console_status in {403, 404}
            if is_refused:
                self.log.warning("The console refuses notebook %s: %s", self.notebook_id, error.jupyterhub_message)
                return 1
            return None
        self._refused_since = None
        if notebook["state"] not in ENDED:
            return None
        return 1 if notebook["state"] == "failed" else 0

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield JupyterHub's progress events: the most that the notebook can cost, and what it waits for."""
        # JupyterHub wants a percentage. The console knows none, so each new sentence moves the bar a little.
        shown_sentence, percent = "", 10
        while self._start_pending:
            sentence = " ".join(filter(None, (self.ceiling, self._waiting)))
            if sentence != shown_sentence:
                shown_sentence, percent = sentence, min(percent + 20, 90)
                yield {"progress": percent, "message": sentence}
            await asyncio.sleep(POLL_SECONDS)

    def get_state(self) -> dict[str, Any]:
        """Return the state that the hub keeps across restarts."""
        return super().get_state() | {"notebook_id": self.notebook_id, "url": self.url}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue with the notebook that ran when the hub stopped."""
        super().load_state(state)
        self.notebook_id, self.url = state.get("notebook_id"), state.get("url", "")
        if self.url:
            self._redirect()

    def clear_state(self) -> None:
        """Forget the notebook."""
        super().clear_state()
        REDIRECTS.targets.pop(self._prefix, None)
        self.notebook_id, self.url, self.ceiling, self._waiting, self._refused_since = None, "", "", "", None

    def _api(self) -> NotebooksClient:
        return NotebooksClient(
            console_url=self.console_url,
            user=self.user,
            authenticator=self.authenticator,
            organization=str(self.user_options.get("organization", "")),
        )

    def _purchase(self) -> dict[str, Any]:
        """Return the fields of the purchase that the user's options ask for. Raises Refused."""
        number = str(self.user_options.get("profile", "0"))
        if not (number.isdecimal() and int(number) < len(self.profiles)):
            raise Refused(400, "Choose one of the sizes." if self.profiles else "This hub offers no notebooks yet.")
        profile = self.profiles[int(number)]
        fields = {field: profile[field] for field in PURCHASE_FIELDS if field in profile}
        # The name includes the profile, so that `_find_open_notebook` takes over no notebook of another profile. The
        # ceiling and the time limit cannot show the profile, because an extension or a new price changes them.
        words = f"JupyterHub {self.user.name} {self.name} ({profile['name']})".split()
        name = " ".join(words)[:100].rstrip()  # as the console stores names
        return fields | {"name": name, "workspace": str(self.user_options.get("workspace") or self.workspace)}

    async def _find_open_notebook(self, api: NotebooksClient, purchase: dict[str, Any]) -> dict[str, Any] | None:
        """Return the notebook that was bought for this server and has not ended; None if there is none.

        The API lists the notebooks of the whole organization. Those of other members do not count: any
        member can choose the same name, and code of a notebook's buyer may wait there for the next user.
        """
        own_number = account_number(await self.user.get_auth_state())
        query, oldest = "?page_size=200", datetime.now(UTC) - MAX_AGE  # the API's largest page
        while query:
            page = await api.call("GET", query)
            for notebook in page["results"]:
                is_same = all(notebook[key] == purchase[key] for key in ("name", "workspace", "image", "node_spec"))
                is_own = str(notebook.get("placed_by")) == own_number
                if is_own and is_same and notebook["state"] not in {*ENDED, "stopping"}:
                    return notebook
            # Only the query of the next page's address is used: the token must not be sent to any other address.
            query = f"?{urlsplit(page['next']).query}" if page["next"] else ""
            if query and datetime.fromisoformat(page["results"][-1]["queued_at"]) < oldest:
                return None
        return None

    async def _buy(self, api: NotebooksClient, purchase: dict[str, Any]) -> dict[str, Any]:
        quote = await api.call("POST", "quotes/", purchase)
        if quote["refusal"]:
            raise Refused(402, quote["refusal"])
        notebook = await api.call("POST", body={"quote": quote["id"]}, idempotency_key=str(quote["id"]))
        self.ceiling = f"Costs at most {money(quote['ceiling_minor'], quote['currency'])}."
        return notebook

    def _redirect(self) -> None:
        """Let the hub's proxy redirect from this server's address to the notebook."""
        REDIRECTS.listen(self.redirect_ip, self.redirect_port)
        self._prefix = self.server.base_url
        REDIRECTS.targets[self._prefix] = self.url


def _select(name: str, label: str, choices: list[tuple[str, str]]) -> str:
    """Return the HTML of a drop-down list; empty if it would have fewer than two choices."""
    if len(choices) < 2:
        return ""
    options = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices)
    return (
        f'<label for="{name}">{label}</label><select class="form-select" id="{name}" name="{name}">{options}</select>'
    )
