"""List models, and download a version."""

from __future__ import annotations

from pathlib import Path

import click

from ..downloads import save, target_of
from ..errors import InvalidChoice
from ..screen import size
from ..session import Session, json_option, pass_session


@click.group()
def models() -> None:
    """List models and download a version."""


@models.command("list")
@json_option
@pass_session
def list_models(session: Session) -> None:
    """List the models, newest first."""
    results = list(session.connect().models())
    if session.screen.print_if_json(results):
        return
    rows = []
    for model in results:
        latest = model.latest
        rows.append(
            (model.name, f"{latest.version}", size(latest.size_bytes), f"{latest.lineage.get('job', '')}")
            if latest
            else (model.name, "none", "", "")
        )
    session.screen.table(("Name", "Latest", "Size", "Job"), rows, right_aligned=("Latest", "Size", "Job"))


@models.command()
@click.argument("reference", metavar="NAME[@VERSION]")
@click.option("--to", "folder", type=click.Path(path_type=Path), default=".", help="The folder to save to.")
@json_option
@pass_session
def get(session: Session, reference: str, folder: Path) -> None:
    """Download a version of a model (default: the latest) as a .tar.gz archive."""
    name, at, number = reference.partition("@")
    if at and not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise InvalidChoice("Write a version as a number, for example net@3.")
    client = session.connect()
    model = client.model(name)
    if number:
        version = int(number)
    elif model.latest:
        version = model.latest.version
    else:
        raise InvalidChoice(f"The model {name} has no version.")
    target = target_of(folder, f"{name}-v{version}.tar.gz")
    if target.exists():
        raise InvalidChoice(f"{target} exists. Delete it, or choose another folder with --to.")
    # The console makes the archive while it sends it, so nobody knows the size before.
    transfer = session.screen.transfer(target.name, size_bytes=None)
    with client.model_archive(name, version) as response, transfer as advance:
        received = save(response, target, on_received=advance)
    document = {"model": name, "version": version, "file": str(target), "size_bytes": received}
    if not session.screen.print_if_json(document):
        session.screen.print(f"Saved {target}, {size(received)}.", style="green")
