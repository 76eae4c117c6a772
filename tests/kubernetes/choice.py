"""Which cluster the tests use: the fake, or, where KUBECONFIG is set, the one that it names.

The one rule: a process opens a real cluster once, whoever asks for it, so that there is one namespace of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.sites import FakeSite, Site
from tests.kubernetes.staged import StagedSite


class _Shared:
    """The real cluster, while anybody uses it."""

    site: StagedSite | None = None
    users = 0


def real_kubeconfig() -> Path | None:
    """The real cluster's, where tests are to use one. A console that they start looks for it from another folder."""
    told = os.environ.get("KUBECONFIG", "")
    if not told:
        return None
    path = Path(told).expanduser().resolve()
    if not path.is_file():
        several = " Name one file: kubectl config view --flatten > one.yaml" if os.pathsep in told else ""
        pytest.exit(f"KUBECONFIG is '{told}', and that is no file.{several}", returncode=1)
    return path


def open_site(folder: Path) -> Iterator[Site]:
    """The cluster that tests are to use, until they are done with it."""
    kubeconfig = real_kubeconfig()
    if kubeconfig is None:
        fake = FakeSite(folder)
        for node in fake.fake.nodes.values():
            node.holds_cpus = True
        yield fake
        fake.close()
        return
    if _Shared.site is None:
        _Shared.site = StagedSite(kubeconfig)
    _Shared.users += 1
    try:
        yield _Shared.site
    finally:
        _Shared.users -= 1
        if not _Shared.users:
            site, _Shared.site = _Shared.site, None
            site.close()
