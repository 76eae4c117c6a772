"""The vendored part of Tabler's style sheet has the rules of every class in use."""

import shutil
import subprocess

import pytest
from django.conf import settings

TOOLS = settings.BASE_DIR / "var" / "styles"


@pytest.mark.slow
@pytest.mark.skipif(
    not (TOOLS / ".installed").exists() or shutil.which("node") is None,
    reason="There is no PurgeCSS: it needs node and npm, and `make styles`",
)
def test_the_style_sheet_is_what_make_styles_writes(tmp_path):
    shutil.copy(settings.BASE_DIR / ".ci" / "styles" / "purge.mjs", TOOLS)
    subprocess.run(["node", TOOLS / "purge.mjs", tmp_path / "new.css"], check=True)
    vendored = settings.BASE_DIR / "static" / "vendor" / "tabler" / "tabler.min.css"
    assert vendored.read_text() == (tmp_path / "new.css").read_text(), "Run `make styles`"
