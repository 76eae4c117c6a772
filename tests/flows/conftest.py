"""A console with a bare image that these tests share, and customers. `torch_console` is in `tests/conftest.py`."""

from __future__ import annotations

import venv

import pytest

from runtime.images import venvs
from tests.flows.console import Buyer, Console, served
from tests.runtime.packages.index import Index


@pytest.fixture(scope="session")
def bare_images(tmp_path_factory):
    """An images root whose `pytorch` is an interpreter and nothing else."""
    root = tmp_path_factory.mktemp("images")
    venv.create(root / "pytorch", with_pip=False, symlinks=True)
    venvs.mark_ready(root / "pytorch", "bare")
    return root


@pytest.fixture(scope="package")
def index(tmp_path_factory):
    """The console's package index, with the package `alpha`."""
    created = Index(tmp_path_factory.mktemp("packages") / "index")
    created.add_wheel("alpha")
    return created


@pytest.fixture(scope="package")
def console(bare_images, index, short_folders):
    """A console on two cores, whatever the machine has, for plain Python."""
    settings = {"LOCAL_CPUS": "2", "LOCAL_MEMORY_MIB": "8192", "PACKAGE_INDEXES": index.address}
    yield from served(Console(short_folders(), bare_images, **settings))


@pytest.fixture(scope="package")
def buyer(console):
    """A customer with money in the wallet and WAIT in the workspace."""
    customer = Buyer(console)
    yield customer
    customer.http.close()


@pytest.fixture(autouse=True)
def _alone_on_the_cluster(request):
    for name in {"console", "torch_console"} & set(request.fixturenames):
        console = request.getfixturevalue(name)
        if not console.is_ready():  # the test before, or this one's first try, failed while parts of it were killed
            console.kill_all()
            console.up()
    yield
    for name in {"buyer", "torch_buyer"} & set(request.fixturenames):
        request.getfixturevalue(name).cancel_what_goes_on()


@pytest.fixture(scope="package")
def torch_buyer(torch_console):
    """The same, of the console with torch."""
    customer = Buyer(torch_console)
    yield customer
    customer.http.close()
