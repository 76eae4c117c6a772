import pytest

from tests.runtime.launcher.pods import Cluster


@pytest.fixture
def cluster(tmp_path):
    """The pods of one run."""
    created = Cluster(tmp_path)
    yield created
    created.close()
