"""List workspaces, and send the files of a folder to one."""

from __future__ import annotations

from pathlib import Path

import click

from .. import sync as workspace_sync
from ..client import Client
from ..folders import scan
from ..screen import count, size
from ..session import Session, json_option, pass_session, yes_option

MANY_FILES, MANY_BYTES = 1000, 500 * 1000**2
"""If a sync would send more, it asks first: a project of scripts has less, so the folder may be the wrong one."""
SHOWN_PATHS = 20
"""How many paths to delete are listed before the question: as many as fit on a terminal."""


@click.group()
def workspace() -> None:
    """List workspaces and send a folder's files to one."""


@workspace.command("list")
@json_option
@pass_session
def list_workspaces(session: Session) -> None:
    """List the workspaces, newest first."""
    results = list(session.connect().workspaces())
    if not session.screen.print_if_json(results):
        rows = [(result.name, size(result.size_bytes), result.created_at) for result in results]
        session.screen.table(("Name", "Size", "Created"), rows, right_aligned=("Size",))


@workspace.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@click.option("--workspace", "name", default="", help="The workspace. Default: the folder's name.")
@click.option("--delete", is_flag=True, help="Also delete files of the workspace that the folder does not have.")
@yes_option
@json_option
@pass_session
def sync(session: Session, folder: Path, name: str, delete: bool, yes: bool) -> None:
    """Send new and changed files of FOLDER to a workspace. Create the workspace if it does not exist.

    `.trainyardignore`, in the form of .gitignore, names files to leave out.
    """
    client = session.connect()
    name = name or workspace_sync.workspace_name(folder)
    plan = sync_folder(session, client, folder, name, is_confirmed=yes, delete=delete)
    session.screen.print_if_json(
        {
            "workspace": name,
            "sent": [file.path for file in plan.changed],
            "unchanged": plan.unchanged_count,
            "deleted": list(plan.extra),
        }
    )


def sync_folder(
    session: Session, client: Client, folder: Path, name: str, *, is_confirmed: bool, delete: bool = False
) -> workspace_sync.Plan:
    """Send new and changed files of a folder to a workspace, and print what was done."""
    screen = session.screen
    scan_result = scan(folder)
    if scan_result.skipped:
        paths = ", ".join(scan_result.skipped[:10])
        screen.print(f"Left out (links, devices, or names that are not UTF-8): {paths}")
    plan = workspace_sync.plan(client, name, scan_result, with_extra=delete)
    files = count(len(plan.changed), "file")
    if len(plan.changed) > MANY_FILES or plan.size > MANY_BYTES:
        session.confirm(
            f"Send {files}, {size(plan.size)}, of {folder.resolve()} to the workspace {name}?",
            is_confirmed=is_confirmed,
        )
    if plan.extra:
        screen.print(f"Not in {folder.resolve()}:")
        for path in plan.extra[:SHOWN_PATHS]:
            screen.print(f"  {path}")
        if len(plan.extra) > SHOWN_PATHS:
            screen.print(f"  and {len(plan.extra) - SHOWN_PATHS:,} more")
        session.confirm(
            f"Delete {count(len(plan.extra), 'path')} of the workspace {name}? Its recycle bin keeps them.",
            is_confirmed=is_confirmed,
        )
    with screen.transfer(f"Sending to {name}", plan.size) as advance:
        workspace_sync.send(client, session.uploads(client), name, plan, on_sent=advance)
    workspace_sync.delete_extra(client, name, plan)
    deleted = f", {len(plan.extra):,} deleted" if plan.extra else ""
    screen.print(
        f"Workspace {name}: {files} sent ({size(plan.size)}), {plan.unchanged_count:,} unchanged{deleted}.",
        style="green",
    )
    return plan
