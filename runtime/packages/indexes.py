"""The package indexes that runs' packages may come from: the setting PACKAGE_INDEXES, else pip's configuration.

An index is a URL or a folder on this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from runtime.errors import RuntimeFault
from runtime.images import uv

DEFAULT_INDEX = "https://pypi.org/simple"
DEFAULT_FILE_HOSTS = ("files.pythonhosted.org",)
"""Hosts of the files that DEFAULT_INDEX lists."""
_PORTS = {"http": 80, "https": 443}
"""The default port of each scheme that an index may have."""
_INDEX_NAME = re.compile(r"[\w.-]+")
"""The name that uv allows before an index's address."""
_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE")
"""Environment variables of uv for the settings that this module reads."""


class InvalidIndexes(RuntimeFault):
    """The configured package indexes cannot be used. The operator must correct the setting."""

    code = "invalid_indexes"


@dataclass(frozen=True)
class Indexes:
    """Package indexes. `addresses` and `find_links` are URLs or folders; the first address is the default index.

    `find_links` is pip's option of this name: pages or folders that list files of any packages.
    `hosts` has the host and port of each server that packages may be downloaded from, and whether it may have a private
    address. `certificate` is a file of trusted certificates; "" means the system's.
    """

    addresses: tuple[str, ...]
    find_links: tuple[str, ...]
    hosts: Mapping[tuple[str, int], bool]
    certificate: str = ""


def load_indexes(
    addresses: Sequence[str], file_hosts: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Indexes:
    """Return the allowed indexes. `addresses` and `file_hosts` are the settings PACKAGE_INDEXES and PACKAGE_FILE_HOSTS.

    Without `addresses`, the indexes of pip's configuration are allowed. `environment` has that configuration in the
    form of uv's variables; None: ask pip for it. Raises InvalidIndexes.
    """
    variables = _pip_configuration() if environment is None else environment
    find_links: tuple[str, ...] = ()
    chosen_default = variables.get("UV_DEFAULT_INDEX")
    # Only an index that the operator has chosen may have a private address. If a name server gave a private address for
    # the default index, downloads would reach a machine of the operator's network that nobody meant to open to
    # customers.
    is_default_chosen = bool(addresses or chosen_default)
    if not addresses:
        default = chosen_default or DEFAULT_INDEX
        addresses = [_without_name(address) for address in (default, *variables.get("UV_INDEX", "").split())]
        find_links = tuple(part for part in variables.get("UV_FIND_LINKS", "").split(",") if part)
    hosts: dict[tuple[str, int], bool] = {}
    for address in (*addresses, *find_links):
        parts = _split(address)
        if parts.scheme in {"", "file"}:
            continue
        if parts.scheme not in _PORTS or not parts.hostname:
            raise InvalidIndexes(
                f"PACKAGE_INDEXES: '{_without_credentials(address)}' is neither an http address nor a folder."
            )
        if parts.username or parts.password:
            # Packages that are built run their own code beside the installer, and it could read the credentials.
            raise InvalidIndexes(
                f"PACKAGE_INDEXES: the index on {parts.hostname} has credentials in its address. Customers' packages "
                "could read them. Use an index that needs none."
            )
        # Every other address than the default index is the operator's choice.
        hosts[_host_of(address, _PORTS[parts.scheme])] = is_default_chosen or address != DEFAULT_INDEX
    if any(address.rstrip("/") == DEFAULT_INDEX for address in addresses):
        hosts |= {(name, 443): is_default_chosen for name in DEFAULT_FILE_HOSTS}
    for file_host in file_hosts:
        hosts[_host_of(f"//{file_host}", 443)] = True
    return Indexes(tuple(addresses), find_links, hosts, variables.get("SSL_CERT_FILE", ""))


def folder_of(address: str) -> Path | None:
    """Return the folder of an index on this machine; None for an index on a server."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(address) if not parts.scheme else None


def _host_of(address: str, default_port: int) -> tuple[str, int]:
    """Return the host and port of an address. Raises InvalidIndexes."""
    parts = _split(address)
    try:
        return (parts.hostname or "").lower(), parts.port or default_port
    except ValueError as error:
        raise InvalidIndexes(
            f"PACKAGE_INDEXES or PACKAGE_FILE_HOSTS: '{_without_credentials(address)}' has no valid port."
        ) from error


def _split(address: str) -> SplitResult:
    """Return the parts of an address. Raises InvalidIndexes."""
    try:
        return urlsplit(address)
    except ValueError as error:  # such as an IPv6 address without its closing bracket
        raise InvalidIndexes(
            f"PACKAGE_INDEXES or PACKAGE_FILE_HOSTS: '{_without_credentials(address)}' is not a valid address."
        ) from error


def _without_credentials(address: str) -> str:
    """Return an address for a message: `***` replaces a user name and password, and all that comes before them."""
    _credentials, at_sign, host_and_path = address.rpartition("@")
    return f"***@{host_and_path}" if at_sign else address


def _without_name(address: str) -> str:
    """Return the address of an index of uv's form `name=address`; an address without a name as it is."""
    name, separator, plain_address = address.partition("=")
    return plain_address if separator and _INDEX_NAME.fullmatch(name) else address


def _pip_configuration() -> dict[str, str]:
    """Return pip's configuration as uv's variables, each overridden by this process's own variable of that name.

    Raises InvalidIndexes.
    """
    try:
        variables = uv.environment()
    except subprocess.CalledProcessError as error:
        # pip's message is left out: it may quote a line of the file, and lines may have credentials.
        raise InvalidIndexes(
            "pip's configuration on the console's machine cannot be read. Run there: pip config list"
        ) from error
    return variables | {name: os.environ[name] for name in _UV_VARIABLES if name in os.environ}
