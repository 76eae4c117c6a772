"""Who may do what in the fake cluster: tokens, service accounts, role-based access control.

The one rule: the administrator's token may do everything; every other is a service account's, and may do what its
roles say and nothing else.
"""

from __future__ import annotations

import secrets
from typing import Any

from tests.kubernetes.resources import ApiError, Object
from tests.kubernetes.store import Store

ADMIN = "system:admin"


class Access:
    """Tokens of one cluster and what they are good for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.admin_token = secrets.token_hex(8)
        self._users = {self.admin_token: ADMIN}

    def token_for(self, namespace: str, account: str) -> str:
        """A new token of a service account."""
        self._store.get("serviceaccounts", namespace, account)
        token = secrets.token_hex(8)
        self._users[token] = f"system:serviceaccount:{namespace}:{account}"
        return token

    def revoke(self, token: str) -> None:
        """The token is good for nothing any more."""
        self._users.pop(token, None)

    def user(self, header: str, *, certified: bool = False) -> str:
        """Whose token this is; who shows a certificate instead is the administrator. Raises ApiError 401."""
        found = self._users.get(header.removeprefix("Bearer ").strip())
        if certified and not header:
            return ADMIN
        if found is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return found

    def allows(self, user: str, *, verb: str, group: str, what: str, namespace: str, name: str) -> bool:
        """Whether this user may. `what` is the plural, with `/subresource` where one is meant."""
        if user == ADMIN:
            return True
        for rule in self._rules(user, namespace):
            if (
                _has(rule.get("verbs"), verb)
                and _has(rule.get("apiGroups"), group)
                and _has(rule.get("resources"), what)
                and (not rule.get("resourceNames") or name in rule["resourceNames"])
            ):
                return True
        return False

    def demand(self, user: str, *, verb: str, group: str, what: str, namespace: str, name: str) -> None:
        """Raises ApiError 403."""
        if not self.allows(user, verb=verb, group=group, what=what, namespace=namespace, name=name):
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            message = (
                f'{what}{f" {name!r}" if name else ""} is forbidden: User "{user}" cannot {verb} resource "{what}"'
            )
            raise ApiError(403, "Forbidden", f'{message} in API group "{group}"{where}', {"kind": what})

    def _rules(self, user: str, namespace: str) -> list[Object]:
        rules: list[Object] = []
        for binding in self._store.find("clusterrolebindings"):
            if _binds(binding, user):
                rules += self._role("clusterroles", "", binding["roleRef"]["name"])
        for binding in self._store.find("rolebindings", namespace) if namespace else []:
            if _binds(binding, user):
                cluster_wide = binding["roleRef"]["kind"] == "ClusterRole"
                plural, where = ("clusterroles", "") if cluster_wide else ("roles", namespace)
                rules += self._role(plural, where, binding["roleRef"]["name"])
        return rules

    def _role(self, plural: str, namespace: str, name: str) -> list[Object]:
        try:
            return list(self._store.get(plural, namespace, name).get("rules") or [])
        except ApiError:
            return []


def _binds(binding: Object, user: str) -> bool:
    return any(
        subject["kind"] == "ServiceAccount"
        and user == f"system:serviceaccount:{subject.get('namespace', '')}:{subject['name']}"
        for subject in binding.get("subjects") or []
    )


def _has(words: Any, word: str) -> bool:
    return bool(words) and ("*" in words or word in words)
