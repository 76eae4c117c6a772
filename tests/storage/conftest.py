"""Folders to walk."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace's folder, with a secret beside it."""
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder for unfinished things."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder
