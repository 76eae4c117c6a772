"""Log in to JupyterHub with an account of the console."""

from __future__ import annotations

from typing import Any

from oauthenticator.generic import GenericOAuthenticator
from tornado import web
from traitlets import Set, Unicode, default


class TrainyardAuthenticator(GenericOAuthenticator):
    """OAuthenticator's GenericOAuthenticator, configured for a console. The spawner uses each person's access token."""

    console_url = Unicode(
        config=True, help="Address of the console (its TRAINYARD_URL), such as https://console.example.com."
    )
    allowed_organizations = Set(
        Unicode(),
        config=True,
        help="Short names of organizations whose members may log in. To let everybody in, set `allow_all`.",
    )

    @default("login_service")
    def _login_service(self) -> str:
        return "Trainyard"

    @default("authorize_url")
    def _authorize_url(self) -> str:
        return f"{self.console_url.rstrip('/')}/identity/o/authorize"

    @default("token_url")
    def _token_url(self) -> str:
        return f"{self.console_url.rstrip('/')}/identity/o/api/token"

    @default("userdata_url")
    def _userdata_url(self) -> str:
        return f"{self.console_url.rstrip('/')}/identity/o/api/userinfo"

    @default("scope")
    def _scope(self) -> list[str]:
        return ["openid", "email", "profile", "organizations", "notebooks"]

    @default("username_claim")
    def _username_claim(self) -> str:
        return "sub"  # the account's number; an e-mail address may change, or belong to somebody else one day

    @default("enable_auth_state")
    def _enable_auth_state(self) -> bool:
        return True  # the spawner needs the token

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """Return the hub's name for a user. Refuse an e-mail address that the console has not verified."""
        if self.username_claim == "email" and not user_info.get("email_verified"):
            raise web.HTTPError(403, "Verify your e-mail address in the console, then log in again.")
        return super().user_info_to_username(user_info)

    async def check_allowed(self, username: str, auth_model: dict[str, Any] | None) -> bool:
        """Return whether the person may log in, by JupyterHub's settings or as a member of an allowed organization."""
        if await super().check_allowed(username, auth_model):
            return True
        return bool(auth_model) and not self.allowed_organizations.isdisjoint(slugs(auth_model["auth_state"]))


def organizations(auth_state: dict[str, Any] | None) -> list[dict[str, str]]:
    """Return the person's organizations, as the console stated them at the last log-in or refresh."""
    return _user_info(auth_state).get("organizations") or []


def account_number(auth_state: dict[str, Any] | None) -> str:
    """Return the number of the person's account of the console; empty if it is not known."""
    return str(_user_info(auth_state).get("sub") or "")


def slugs(auth_state: dict[str, Any] | None) -> set[str]:
    """Return the short names of the person's organizations."""
    return {organization["slug"] for organization in organizations(auth_state)}


def _user_info(auth_state: dict[str, Any] | None) -> dict[str, Any]:
    return (auth_state or {}).get(TrainyardAuthenticator.user_auth_state_key) or {}
