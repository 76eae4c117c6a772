"""Datasets: list them, and publish versions."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ApiError
from ..folders import Scan, scan
from ..screen import size
from ..session import Session, json_option, pass_session
from ..uploads import content_of


@click.group()
def datasets() -> None:
    """List datasets and publish versions."""


@datasets.command("list")
@json_option
@pass_session
def list_datasets(session: Session) -> None:
    """List the datasets, newest first."""
    results = list(session.connect().datasets())
    if session.screen.print_if_json(results):
        return
    rows = []
    for dataset in results:
        latest = dataset.latest
        rows.append(
            (dataset.name, f"{latest.version}", f"{latest.file_count:,}", size(latest.size_bytes), latest.published_at)
            if latest
            else (dataset.name, "none", "", "", "")
        )
    session.screen.table(
        ("Name", "Latest", "Files", "Size", "Published"), rows, right_aligned=("Latest", "Files", "Size")
    )


@datasets.command()
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@pass_session
def push(session: Session, name: str, path: Path) -> None:
    """Publish PATH as the next version of the dataset NAME, which is created if it does not exist.

    PATH is an archive (.tar, .tar.gz, .zip), a folder or a file. If the upload is interrupted, run the same command
    again to continue it.
    """

    def scan_folder(folder: Path) -> Scan:
        scan_result = scan(folder, defaults=())  # the default rules are for projects of code
        if scan_result.skipped:
            paths = ", ".join(scan_result.skipped[:10])
            session.screen.print(f"Left out (links, devices, or names that are not UTF-8): {paths}")
        return scan_result

    content = content_of(path, scan_folder)
    client = session.connect()
    try:
        client.create_dataset(name)
    except ApiError as error:
        if error.code != "name_taken":
            raise
    filename = path.resolve().name + (".tar" if path.is_dir() else "")  # only shown on the console's pages
    metadata = {"purpose": "dataset", "name": name, "filename": filename}
    with session.screen.transfer(f"Sending {path.name}", content.size) as advance:
        upload = session.uploads(client).send(content, metadata, on_sent=advance)
    if not session.screen.print_if_json({"dataset": name, "version": upload.version, "size_bytes": upload.size_bytes}):
        session.screen.print(f"Published {name}@{upload.version}, {size(upload.size_bytes)} sent.", style="green")
