"""Fill a new workspace with the files of a git repository, read over https from an allowed host.

Neither the repository nor its server is trusted. Git only fetches one commit and writes it as a tar file, which
`storage.archives` unpacks like every upload. Because nothing is checked out, git runs no hooks and filters, and fetches
no submodules and LFS objects. The console resolves the host's name once, to public addresses. Git may connect only to
these, and follows no redirects.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings
from django.utils.translation import gettext_lazy as _
from django.views.decorators.debug import sensitive_variables

from console.accounts.models import Organization
from console.core.errors import InvalidInput, NotFound
from runtime.packages.proxy import is_public
from storage import catalog, secret_store
from storage.archive_readers import ArchiveFormat, ArchiveLimits
from storage.archives import unpack_archive
from storage.errors import GitFailed
from storage.files import SpaceCounter
from storage.trees import Usage

PROTOCOL = "https"
"""The only protocol that git may use."""
MAX_SECONDS = 300
"""How long one git command may take. Only one repository is imported at a time, and the others wait for it."""
REPORT_SECONDS = 2.0
"""How often the progress is reported to people who watch it in a page."""
MAX_BYTES = 1024**3
"""The largest file that git may write. It writes three: the packed commit, the tar file made from it, and its error
output. Repositories of code are far smaller, and data belongs in datasets."""
MAX_MEMORY_BYTES = 2 * 1024**3
"""The largest address space of a git process. To unpack deltas it needs as much memory as the largest file."""
MAX_ERROR_BYTES = 64 * 1024
"""How much of the end of git's error output is read. It contains the server's messages, which have no limit."""
MAX_REASON_LENGTH = 300
"""How many characters of git's own error message the customer sees."""
_BRANCH = re.compile(r"^(?!.*(\.\.|//|@\{))[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}\Z")
"""The name of a branch or tag. It cannot begin with a dash, which git would take for an option, and is no revision such
as `main@{1}`."""
_GIT_CONFIG = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    "fetch.unpackLimit": "1",  # store one pack file, whose size is limited, and not any number of loose objects
    "gc.auto": "0",
    "http.followRedirects": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "20",  # end a transfer that stays below 1,000 bytes per second for 20 seconds
    "http.proxy": "",
    "pack.threads": "1",
    "protocol.allow": "never",
}
"""Git's configuration for every command: no programs of the repository or machine, no redirects and proxies, limits."""


def git_fill(
    *,
    organization: Organization,
    url: str,
    branch: str = "",
    secret: str = "",
    report: Callable[[int], None] = lambda _received: None,
) -> catalog.Fill:
    """Return a function that fills a new workspace with the files of a branch or tag, or of the default branch.

    `secret` is the name of the organization's secret with an access token, or empty. `report` is called every
    REPORT_SECONDS with the number of received bytes, and may raise an exception to stop. Raises InvalidInput with the
    fields `git_url`, `git_branch` and `git_secret`. The function raises GitFailed, TooLarge, BadArchive, UnsafePath,
    and SecretUnreadable, also if the secret was deleted meanwhile.
    """
    host, addresses = _check_host(url)
    if branch and not _BRANCH.match(branch):
        raise InvalidInput(fields={"git_branch": _("This is not the name of a branch or tag.")})
    if secret:
        try:
            secret_store.secret_named(organization, secret)
        except NotFound:
            raise InvalidInput(fields={"git_secret": _("There is no such secret. Create it under Secrets.")}) from None
    config = {f"protocol.{PROTOCOL}.allow": "always", "http.curloptResolve": f"{host}:443:{addresses}"}

    def fill(folder: Path, counter: SpaceCounter) -> Usage:
        options = config | _credentials(organization, secret)
        return fetch(url=url, branch=branch, options=options, into=folder, counter=counter, report=report)

    return fill


@sensitive_variables("options")
def fetch(
    *,
    url: str,
    branch: str,
    options: dict[str, str],
    into: Path,
    counter: SpaceCounter,
    report: Callable[[int], None] = lambda _received: None,
) -> Usage:
    """Fetch one commit, and unpack its files into the empty folder `into`. `options` is configuration for git.

    `counter` counts the unpacked files against the quota. `report` is called as in `git_fill`. Raises GitFailed,
    TooLarge, BadArchive, UnsafePath, and what `report` raises.
    """
    with catalog.temporary_folder() as scratch:
        repository, archive = scratch / "repository", scratch / "archive"

        def report_received() -> None:
            report(_received_bytes(repository))

        _git(scratch, options, "init", "--quiet", "--bare", "--template=", str(repository))  # no template, no hooks
        flags = ("--depth=1", "--no-tags", "--no-recurse-submodules", "--no-auto-maintenance", "--quiet")
        fetch_arguments = ("fetch", *flags, "--", url, branch or "HEAD")
        # The .gitattributes of the commit may leave files out of archives, or change them. This file takes precedence.
        attributes = repository / "info" / "attributes"
        attributes.parent.mkdir(exist_ok=True)
        attributes.write_text("* -export-ignore -export-subst\n")
        _git(scratch, options, f"--git-dir={repository}", *fetch_arguments, on_wait=report_received)
        report_received()
        archive_arguments = ("archive", "--format=tar", f"--output={archive}", "FETCH_HEAD")
        # Without `options`: this command needs neither the network nor the token.
        _git(scratch, {}, f"--git-dir={repository}", *archive_arguments, on_wait=report_received)
        with archive.open("rb") as stream:
            unpack_result = unpack_archive(
                stream=stream, target=into, limits=ArchiveLimits(MAX_BYTES, settings.MAX_ARCHIVE_FILES),
                counter=counter, archive_format=ArchiveFormat.TAR,
            )  # fmt: skip
    return Usage(unpack_result.size_bytes, unpack_result.entry_count)


def _received_bytes(repository: Path) -> int:
    """Return how many bytes git has received so far, from the size of its pack files."""
    size = 0
    for path in (repository / "objects" / "pack").glob("*"):
        with suppress(FileNotFoundError):  # git renames its temporary files meanwhile
            size += path.stat().st_size
    return size


def _check_host(url: str) -> tuple[str, str]:
    """Return the host of an allowed URL, and its public IP addresses in curl's form. Raises InvalidInput."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    # 500 characters are the length of the database column.
    is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 500
    if (
        not is_plain
        or parts.scheme != "https"
        or port is not None
        or parts.username is not None
        or parts.query
        or parts.fragment
    ):
        sentence = _("Enter an address such as https://github.com/name/repository.git, without a user name.")
        raise InvalidInput(fields={"git_url": sentence})
    if host not in settings.TRAINYARD_GIT_HOSTS:
        hosts = ", ".join(settings.TRAINYARD_GIT_HOSTS) or "–"
        raise InvalidInput(fields={"git_url": _("Repositories may come from: %(hosts)s.") % {"hosts": hosts}})
    try:
        resolved = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    except OSError:
        raise InvalidInput(fields={"git_url": _("This host can't be found. Check its name.")}) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in resolved))
    if not all(map(is_public, addresses)):
        raise InvalidInput(fields={"git_url": _("This host has a private address, so it can't be used.")})
    return host, ",".join(f"[{address}]" if ":" in address else address for address in addresses)


@sensitive_variables()
def _credentials(organization: Organization, secret: str) -> dict[str, str]:
    """Return git's option to authenticate with the token in a secret; empty without a secret.

    GitHub, GitLab and others accept a token as the password of any user name.
    """
    if not secret:
        return {}
    token = secret_store.values_of(organization, [secret])[secret].strip()
    login = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    return {"http.extraHeader": f"Authorization: Basic {login}"}


@sensitive_variables("options", "environment")
def _git(scratch: Path, options: dict[str, str], *arguments: str, on_wait: Callable[[], None] = lambda: None) -> None:
    """Run git with limits, and call `on_wait` every REPORT_SECONDS. Raises GitFailed.

    Git gets `options` in environment variables, because other users of the machine can read arguments.
    """
    path = shutil.which("git")
    if path is None:
        raise GitFailed(_("This installation has no git. Ask the administrator to install it."))
    all_options = list((_GIT_CONFIG | options).items())
    environment = {
        "PATH": os.defpath,
        "HOME": str(scratch),
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        "GIT_ALLOW_PROTOCOL": PROTOCOL,
        "GIT_CONFIG_COUNT": str(len(all_options)),
    }
    for number, (name, value) in enumerate(all_options):
        environment |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    # The shell's `ulimit`: no core dump (c), file size in blocks of 512 bytes (f), memory in KiB (v), CPU seconds (t).
    # `_wait_for` ends git after MAX_SECONDS. The CPU limit, a second later, holds even if this process dies.
    limits = {"c": 0, "f": MAX_BYTES // 512, "v": MAX_MEMORY_BYTES // 1024, "t": MAX_SECONDS + 1}
    script = " && ".join([*(f"ulimit -{name} {value}" for name, value in limits.items()), 'exec "$@"'])
    with (scratch / "errors").open("wb+") as errors:
        with subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", path, *arguments],
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        ) as process:
            try:
                _wait_for(process, on_wait)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also the helpers that git has started
        if process.returncode:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERROR_BYTES))
            reason = _reason(errors.read(MAX_ERROR_BYTES))
            raise GitFailed(_("The repository can't be read: %(reason)s") % {"reason": reason})


def _wait_for(process: subprocess.Popen[bytes], on_wait: Callable[[], None]) -> None:
    """Wait until git ends. Raises GitFailed after MAX_SECONDS."""
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            raise GitFailed(_("The repository took too long. Use a smaller one, or upload its files."))
        try:
            process.wait(timeout=min(REPORT_SECONDS, left_seconds))
        except subprocess.TimeoutExpired:
            on_wait()
        else:
            return


def _reason(errors: bytes) -> str:
    """Return the line of git's error output that tells why it failed, without control characters."""
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    last_line = lines[-1] if lines else "git failed"
    reason = next((line for line in lines if line.startswith(("fatal:", "remote:"))), last_line)
    return "".join(character for character in reason if character.isprintable())[:MAX_REASON_LENGTH]
