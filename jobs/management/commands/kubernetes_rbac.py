"""Print the minimal roles that the console needs on a Kubernetes cluster, for its administrator to apply."""

from __future__ import annotations

from typing import Any

import yaml
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.rbac import rbac


class Command(BaseCommand):
    """`manage.py kubernetes_rbac [NAME] | kubectl apply -f -`."""

    help = "Print the roles that the console needs on a Kubernetes cluster (default: the first), as YAML."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add NAME, --service-account and --namespace."""
        parser.add_argument("name", nargs="?", default="")
        parser.add_argument(
            "--service-account", default="trainyard", help="service account that gets the roles (default: trainyard)"
        )
        parser.add_argument(
            "--namespace", default="trainyard", help="namespace of the service account (default: trainyard)"
        )

    def handle(self, *_args: Any, name: str, service_account: str, namespace: str, **_options: Any) -> None:
        """Print the roles. Raises CommandError if there is no such Kubernetes cluster."""
        clusters = settings.TRAINYARD_CLUSTERS.items()
        configs = {cluster_name: config for cluster_name, config in clusters if isinstance(config, ClusterConfig)}
        if not configs or (name and name not in configs):
            names = f"There are: {', '.join(configs)}." if configs else "There is none."
            raise CommandError(f"TRAINYARD_CLUSTERS names no such cluster of Kubernetes. {names}")
        config = configs[name] if name else next(iter(configs.values()))
        objects = rbac(config, service_account=service_account, service_account_namespace=namespace)
        self.stdout.write(yaml.safe_dump_all(objects, sort_keys=False).strip())
