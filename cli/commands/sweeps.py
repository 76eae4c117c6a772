"""Price, buy, watch and stop sweeps, which search for good parameters."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import click

from ..client import Client
from ..errors import DETACHED, JOB_CANCELLED, JOB_FAILED, InvalidChoice
from ..schemas import Sweep, SweepQuote, Trial
from ..screen import Screen, money
from ..session import Session, json_option, pass_session, yes_option
from .runs import confirm_purchase, show_lines, to_minor

POLL_SECONDS = 5.0
"""Pause between two requests while a sweep is watched. Its trials usually take minutes."""

file_argument = click.argument("file", type=click.Path(path_type=Path))
sweep_argument = click.argument("sweep_id", metavar="SWEEP", type=click.IntRange(min=1))


def buying_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that buy; `_confirm_and_buy` gets their values."""
    wait = click.option(
        "--wait/--detach", default=False, help="Watch the sweep to its end, or return at once (default)."
    )
    limit = click.option("--max-ceiling", help="Buy without a question up to this ceiling, and refuse above it.")
    return wait(limit(yes_option(command)))


@click.group()
def sweep() -> None:
    """Search for good parameters: many runs of one script within one ceiling.

    FILE is TOML (.toml) or JSON with the fields of POST /api/v1/sweeps/quotes/.
    """


@sweep.command()
@file_argument
@json_option
@pass_session
def quote(session: Session, file: Path) -> None:
    """Price the sweep of FILE without buying it."""
    price_quote = session.connect().quote_sweep(_read_file(file))
    if not session.screen.print_if_json(price_quote):
        _show_quote(session.screen, price_quote)


@sweep.command()
@file_argument
@buying_options
@json_option
@pass_session
def buy(session: Session, /, *, file: Path, **options: Any) -> None:
    """Show the price of the sweep of FILE, and buy it.

    Exit status: 0 bought, 5 above --max-ceiling; with --wait as for `watch`.
    """
    client = session.connect()
    _confirm_and_buy(session, client, client.quote_sweep(_read_file(file)), **options)


@sweep.command()
@sweep_argument
@click.option("--trials", type=click.IntRange(min=1), help="Trials to add. Default: as many as the ceiling allows.")
@click.option("--ceiling", help="The most that the new trials may cost together, for example 5.00.")
@buying_options
@json_option
@pass_session
def extend(session: Session, /, *, sweep_id: int, trials: int | None, ceiling: str | None, **options: Any) -> None:
    """Show the price of more trials of an ended sweep, and buy them as a new sweep that continues the search.

    Exit status: as for `buy`.
    """
    client = session.connect()
    form: dict[str, Any] = {} if trials is None else {"trials": trials}
    if ceiling is not None:
        form["ceiling_minor"] = to_minor(ceiling, client.sweep(sweep_id).currency, "--ceiling")
    _confirm_and_buy(session, client, client.quote_extension(sweep_id, form), **options)


@sweep.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Sweeps to list.")
@json_option
@pass_session
def list_sweeps(session: Session, limit: int) -> None:
    """List the sweeps, newest first."""
    results = list(islice(session.connect().sweeps(), limit))
    if not session.screen.print_if_json(results):
        session.screen.table(
            ("Sweep", "Name", "State", "Trials", "Best", "Cost", "Ordered"),
            (
                (f"{result.id}", result.name, result.state, f"{result.trials_done}/{result.trials_total}",
                 _format_number(result.best.value if result.best else None),
                 money(result.cost_minor, result.currency), result.created_at)
                for result in results
            ),
            right_aligned=("Sweep", "Trials", "Best", "Cost"),
        )  # fmt: skip


@sweep.command()
@sweep_argument
@json_option
@pass_session
def show(session: Session, sweep_id: int) -> None:
    """Show a sweep: its state, best trial, cost and all trials."""
    client = session.connect()
    current = client.sweep(sweep_id)
    trials = client.trials(sweep_id)
    if not session.screen.print_if_json(asdict(current) | {"trials": trials}):
        _show_sweep(session.screen, current, trials)


@sweep.command()
@sweep_argument
@json_option
@pass_session
def watch(session: Session, sweep_id: int) -> None:
    """Watch a sweep to its end, and show its trials.

    Exit status: 0 ended with a best trial, 3 ended without one or because of failures, 4 stopped, 130 detached.
    """
    _watch_to_end(session, session.connect(), sweep_id)


@sweep.command()
@sweep_argument
@json_option
@pass_session
def stop(session: Session, sweep_id: int) -> None:
    """Start no more trials and stop the open ones. You pay for the time they used."""
    current = session.connect().stop_sweep(sweep_id)
    if not session.screen.print_if_json(current):
        session.screen.print(f"Sweep {sweep_id}: {current.state}.")


def _read_file(file: Path) -> dict[str, Any]:
    """Return the fields of a sweep. Raises InvalidChoice."""
    try:
        text = file.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
        json.dumps(fields, allow_nan=False)  # raises for dates of TOML and for NaN, which the API cannot accept
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InvalidChoice(f"{file} is not a readable file of TOML (.toml) or JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidChoice(f"{file} must have the fields of a sweep by name.")
    return fields


def _confirm_and_buy(
    session: Session, client: Client, price_quote: SweepQuote, *, wait: bool, max_ceiling: str | None, yes: bool
) -> None:
    """Show a quote, ask, and buy it. Raises as `confirm_purchase` does."""
    screen = session.screen
    _show_quote(screen, price_quote)
    confirm_purchase(session, price_quote, limit=max_ceiling, is_confirmed=yes, noun="sweep")
    new_sweep = client.order_sweep(price_quote.id)
    screen.print(f"Bought: sweep {new_sweep.id}.", style="green")
    if wait:
        _watch_to_end(session, client, new_sweep.id)
    elif not screen.print_if_json(new_sweep):
        screen.print(f"Watch it: trainyard sweep watch {new_sweep.id}")


def _watch_to_end(session: Session, client: Client, sweep_id: int) -> None:
    """Report changes of a sweep until its end, show it, and end the program with its exit status."""
    screen, printed_line = session.screen, ""
    try:
        while not (current := client.sweep(sweep_id)).ended_at:
            if (line := _progress_line(current)) != printed_line:
                screen.print(line)
                printed_line = line
            session.pause(POLL_SECONDS)
    except KeyboardInterrupt:
        screen.print(f"Sweep {sweep_id} goes on. Watch it: trainyard sweep watch {sweep_id}")
        click.get_current_context().exit(DETACHED)
    trials = client.trials(sweep_id)
    if not screen.print_if_json(asdict(current) | {"trials": trials}):
        _show_sweep(screen, current, trials)
    click.get_current_context().exit(_exit_status(current))


def _exit_status(sweep: Sweep) -> int:
    """Return the exit status for an ended sweep, as `watch` documents it.

    The reasons `completed` (all trials have ended) and `ceiling` (another trial could exceed it) are no failures.
    """
    if sweep.reason == "stopped":
        return JOB_CANCELLED
    return 0 if sweep.best and sweep.reason in {"completed", "ceiling"} else JOB_FAILED


def _progress_line(sweep: Sweep) -> str:
    """Return a line about the sweep's current state."""
    parts = [f"{sweep.state}: {sweep.trials_done} of at most {sweep.trials_total} trials"]
    if sweep.best:
        parts.append(f"best {sweep.objective.metric} {_format_number(sweep.best.value)}")
    parts.append(money(sweep.cost_minor, sweep.currency))
    if sweep.waiting_for:
        parts.append(sweep.waiting_for)
    return " · ".join(parts)


def _show_quote(screen: Screen, quote: SweepQuote) -> None:
    """Print a quote, unless the output is JSON."""
    if screen.is_json:
        return
    show_lines(screen, quote, noun="trial")
    screen.print(
        f"At most {quote.trials} trials, together probably {money(quote.estimate.p50_minor, quote.currency)}, "
        f"high estimate {money(quote.estimate.p90_minor, quote.currency)}."
    )


def _show_sweep(screen: Screen, sweep: Sweep, trials: list[Trial]) -> None:
    """Print a sweep and its trials. The best trial has an asterisk."""
    rows = [
        ("Sweep", f"{sweep.id} {sweep.name}"),
        ("State", " ".join(filter(None, (sweep.state, sweep.reason, sweep.waiting_for)))),
        ("Search", f"{sweep.method}, {sweep.objective.goal} {sweep.objective.metric}"),
        ("Trials", f"{sweep.trials_done} of at most {sweep.trials_total}"),
        ("Cost", f"{money(sweep.cost_minor, sweep.currency)}, at most {money(sweep.ceiling_minor, sweep.currency)}"),
    ]
    if best := sweep.best:
        value, parameters = _format_number(best.value), _format_parameters(best.parameters)
        rows.append(("Best", f"trial {best.trial} (job {best.job}), {value}: {parameters}"))
    screen.table(("", ""), rows)
    screen.table(
        ("Trial", "Job", "State", "Value", "Cost", "Parameters"),
        (
            (f"{trial.number}{'*' if trial.is_best else ''}", f"{trial.job}", trial.outcome or trial.state,
             _format_number(trial.value), money(trial.cost_minor, sweep.currency), _format_parameters(trial.parameters))
            for trial in trials
        ),
        right_aligned=("Trial", "Job", "Value", "Cost"),
    )  # fmt: skip


def _format_number(value: float | None) -> str:
    """Return a metric's value with six digits; empty for None."""
    return "" if value is None else f"{value:.6g}"


def _format_parameters(parameters: dict[str, Any]) -> str:
    """Return the parameters of a trial, such as `LR=0.01 EPOCHS=3`."""
    numbers = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in parameters.items()}
    return " ".join(f"{name}={value}" for name, value in numbers.items())
