"""Print the least roles that the console needs on a cluster of Kubernetes, to be applied by its administrator."""

from __future__ import annotations

from typing import Any

import yaml
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from runtime.backends.kubernetes_access import rbac


class Command(BaseCommand):
    """`manage.py kubernetes_rbac [NAME] | kubectl apply -f -`."""

    help = "Print the roles that the console needs on a cluster (the first of Kubernetes, without a name), as YAML."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the name, and whom the roles are for."""
        parser.add_argument("name", nargs="?", default="")
        parser.add_argument("--service-account", default="trainyard", help="whom they are for (trainyard)")
        parser.add_argument("--namespace", default="trainyard", help="where the service account lives (trainyard)")

    def handle(self, *_args: Any, name: str, service_account: str, namespace: str, **_options: Any) -> None:
        """Print. Raises CommandError where there is no such cluster, or it is this machine."""
        configs = {known: config for known, config in settings.TRAINYARD_CLUSTERS.items() if config is not None}
        if not configs or (name and name not in configs):
            known = f"There are: {', '.join(configs)}." if configs else "There is none."
            raise CommandError(f"TRAINYARD_CLUSTERS names no such cluster of Kubernetes. {known}")
        config = configs[name] if name else next(iter(configs.values()))
        objects = rbac(config, service_account=service_account, service_account_namespace=namespace)
        self.stdout.write(yaml.safe_dump_all(objects, sort_keys=False).strip())
