"""Buy, list, extend and stop notebooks: JupyterLab in a workspace."""

from __future__ import annotations

from itertools import islice
from math import isfinite
from typing import Any

import click

from ..client import Client
from ..errors import JOB_FAILED, CliError, InvalidChoice
from ..schemas import Notebook, NotebookExtensionQuote, NotebookQuote
from ..screen import money
from ..session import Session, json_option, pass_session, yes_option
from .runs import confirm_purchase, show_lines, to_minor

POLL_SECONDS = 1.0
"""Pause between two requests while a notebook starts. It starts within seconds if nodes are free."""

notebook_argument = click.argument("notebook_id", metavar="NOTEBOOK", type=click.IntRange(min=1))


@click.group()
def notebook() -> None:
    """Work in JupyterLab on a node, in a workspace, charged by time up to a ceiling."""


@notebook.command()
@click.option("--workspace", default="main", show_default=True, help="Where JupyterLab opens and saves files.")
@click.option("--image", default="pytorch", show_default=True, help="An image with JupyterLab.")
@click.option("--node-spec", help="The node spec. Default: the first on sale.")
@click.option("--dataset", "datasets", multiple=True, metavar="NAME[@VERSION]", help="A dataset to mount; repeatable.")
@click.option("--requirements", default="", metavar="PATH", help="A requirements file inside the workspace.")
@click.option(
    "--job", "inspected_job", type=click.IntRange(min=1), help="An ended job, whose files the notebook reads in /jobs."
)
@click.option(
    "--hours", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True, help="Time limit."
)
@click.option(
    "--idle-minutes", type=click.FloatRange(min=1), default=30.0, show_default=True, help="End after this time idle."
)
@click.option("--ceiling", help="The most that the notebook may cost, for example 5.00. It shortens the time limit.")
@click.option("--max-ceiling", help="Buy without a question up to this ceiling, and refuse above it.")
@yes_option
@json_option
@pass_session
def start(session: Session, /, *, ceiling: str | None, max_ceiling: str | None, yes: bool, **options: Any) -> None:
    """Show the price of a notebook, buy it, and show its address once JupyterLab runs.

    Exit status: 0 JupyterLab runs, 3 the notebook ended before it ran, 5 above --max-ceiling, 130 detached.
    """
    client, screen = session.connect(), session.screen
    node_spec = options["node_spec"] or next((spec.name for spec in client.node_specs()), "")
    form = {name: options[name] for name in ("workspace", "image")} | {"node_spec": node_spec}
    form |= {"datasets": list(options["datasets"])}
    form |= {name: options[name] for name in ("requirements", "inspected_job")}
    form |= {"max_seconds": _to_seconds(options["hours"], 3600, "--hours")}
    form |= {"idle_seconds": _to_seconds(options["idle_minutes"], 60, "--idle-minutes")}
    if ceiling is not None:
        # Only a quote tells the currency, so the notebook is priced once without the ceiling.
        form["ceiling_minor"] = to_minor(ceiling, client.quote_notebook(form).currency, "--ceiling")
    price_quote = client.quote_notebook(form)
    _show_quote(session, price_quote)
    confirm_purchase(session, price_quote, limit=max_ceiling, is_confirmed=yes, noun="notebook")
    new_notebook = client.order_notebook(price_quote.id)
    screen.print(f"Bought: notebook {new_notebook.id}.", style="green")
    current = _wait_until_running(session, client, new_notebook)
    if not screen.print_if_json(current):
        failure = f"Notebook {current.id} ended before it ran: {current.reason or current.state}."
        screen.print(f"Open it in your browser: {current.url}" if current.url else failure)
    if not current.url:
        click.get_current_context().exit(JOB_FAILED)


@notebook.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Notebooks to list.")
@json_option
@pass_session
def list_notebooks(session: Session, limit: int) -> None:
    """List the notebooks, newest first."""
    results = list(islice(session.connect().notebooks(), limit))
    if not session.screen.print_if_json(results):
        session.screen.table(
            ("Notebook", "Name", "State", "Workspace", "Node", "Cost", "Ordered"),
            (
                (f"{result.id}", result.name, result.state, result.workspace, result.node_spec,
                 money(result.cost_minor, result.currency), result.queued_at)
                for result in results
            ),
            right_aligned=("Notebook", "Cost"),
        )  # fmt: skip


@notebook.command()
@notebook_argument
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), required=True, help="Time to add.")
@click.option("--max-ceiling", help="Buy without a question if at most this is added to the ceiling.")
@yes_option
@json_option
@pass_session
def extend(session: Session, notebook_id: int, hours: float, max_ceiling: str | None, yes: bool) -> None:
    """Show the price of more time for a running notebook, and buy it.

    Exit status: 5 above --max-ceiling.
    """
    client = session.connect()
    added_seconds = _to_seconds(hours, 3600, "--hours")
    price_quote = client.quote_notebook_extension(notebook_id, added_seconds=added_seconds)
    _show_quote(session, price_quote)
    confirm_purchase(session, price_quote, limit=max_ceiling, is_confirmed=yes, noun="extension")
    current = client.order_notebook(price_quote.id)  # extends this notebook: the quote is for more time
    if not session.screen.print_if_json(current):
        ceiling = money(current.ceiling_minor, current.currency)
        session.screen.print(f"Extended: notebook {notebook_id}. Its ceiling is {ceiling} now.", style="green")


@notebook.command()
@notebook_argument
@json_option
@pass_session
def stop(session: Session, notebook_id: int) -> None:
    """Stop a notebook. You pay for the time it used. Saved files stay in the workspace."""
    current = session.connect().stop_notebook(notebook_id)
    if not session.screen.print_if_json(current):
        session.screen.print(f"Notebook {notebook_id}: {current.state}.")


def _to_seconds(number: float, unit_seconds: int, option: str) -> int:
    """Return a number of units of time in seconds. Raises InvalidChoice, which names the `option`, for NaN and inf."""
    seconds = number * unit_seconds
    if not isfinite(seconds):
        raise InvalidChoice(f"{option} must be a number such as 2.5.")
    return round(seconds)


def _wait_until_running(session: Session, client: Client, new_notebook: Notebook) -> Notebook:
    """Wait until JupyterLab runs or the notebook has ended, and print what it waits for. Returns the notebook."""
    printed_sentence = ""
    try:
        while not (current := client.notebook(new_notebook.id)).url and not current.finished_at:
            if current.waiting_for != printed_sentence:
                session.screen.print(current.waiting_for)
                printed_sentence = current.waiting_for
            session.pause(POLL_SECONDS)
    except (KeyboardInterrupt, CliError):  # the notebook goes on, and is charged while nobody uses it
        number = new_notebook.id
        session.screen.print(f"Notebook {number} may go on. Stop it: trainyard notebook stop {number}")
        raise
    return current


def _show_quote(session: Session, quote: NotebookQuote) -> None:
    """Print a quote, unless the output is JSON."""
    if session.screen.is_json:
        return
    show_lines(session.screen, quote, noun="notebook")
    if isinstance(quote, NotebookExtensionQuote):
        session.screen.print(f"More time adds at most {money(quote.added_minor, quote.currency)}.")
    session.screen.print(
        f"The notebook ends after {quote.deadline_seconds / 3600:g} hours at the latest, earlier when idle."
    )
