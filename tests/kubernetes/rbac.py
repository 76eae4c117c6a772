"""Authenticate and authorize requests to the fake API server.

The administrator may do everything. Any other token belongs to a service account, which has the permissions of its
roles.
"""

from __future__ import annotations

import secrets
from typing import Any

from tests.kubernetes.resources import ApiError, Object
from tests.kubernetes.store import Store

ADMIN = "system:admin"


class Access:
    """The tokens of one cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.admin_token = secrets.token_hex(8)
        self._users = {self.admin_token: ADMIN}

    def token_for(self, namespace: str, account: str) -> str:
        """Return a new token of a service account. Raises ApiError 404."""
        self._store.get("serviceaccounts", namespace, account)
        token = secrets.token_hex(8)
        self._users[token] = f"system:serviceaccount:{namespace}:{account}"
        return token

    def user(self, header: str, *, has_certificate: bool = False) -> str:
        """Return the user of an Authorization header. Raises ApiError 401."""
        if has_certificate and not header:
            return ADMIN
        user = self._users.get(header.removeprefix("Bearer ").strip())
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def allows(self, user: str, *, verb: str, group: str, what: str, namespace: str, name: str) -> bool:
        """Whether a user has a permission. `what` is the plural, or `plural/subresource`."""
        return user == ADMIN or any(
            _has(rule.get("verbs"), verb)
            and _has(rule.get("apiGroups"), group)
            and _has(rule.get("resources"), what)
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules(user, namespace)
        )

    def demand(self, user: str, *, verb: str, group: str, what: str, namespace: str, name: str) -> None:
        """Raise ApiError 403 unless the user has the permission."""
        if not self.allows(user, verb=verb, group=group, what=what, namespace=namespace, name=name):
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            message = (
                f'{what} is forbidden: User "{user}" cannot {verb} resource "{what}" in API group "{group}" {where}'
            )
            raise ApiError(403, "Forbidden", message, {"kind": what})

    def _rules(self, user: str, namespace: str) -> list[Object]:
        bindings = self._store.find("clusterrolebindings")
        bindings += self._store.find("rolebindings", namespace) if namespace else []
        rules: list[Object] = []
        for binding in bindings:
            accounts = {
                f"system:serviceaccount:{one.get('namespace', '')}:{one['name']}"
                for one in binding.get("subjects") or []
            }
            role = binding["roleRef"]
            cluster_wide = role["kind"] == "ClusterRole"
            plural, where = ("clusterroles", "") if cluster_wide else ("roles", namespace)
            if user in accounts:
                roles = self._store.find(plural, where, lambda one, role=role: one["metadata"]["name"] == role["name"])  # type: ignore[misc]
                rules += [rule for one in roles for rule in one.get("rules") or []]
        return rules


def _has(words: Any, word: str) -> bool:
    return bool(words) and ("*" in words or word in words)
