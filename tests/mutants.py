"""`make mutants` breaks one rule at a time in a copy of the code, and checks that a test fails.

Each mutant is a rule about money that a change might drop. It takes minutes, so it is not part of the tests.
`ONLY=<word>` chooses the mutants whose name contains the word. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One rule is dropped: `old` becomes `new` in `path`, and one of `tests` must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def dropped(statement: str) -> tuple[str, str, str]:
    """Return `path`, `old` and `new` of a mutant that drops a rule of the database, at the end of a migration."""
    return "billing/migrations/0012_move_function.py", 'END $$;\n"""', f'END $$;\n{statement};\n"""'


EVENTS = ("tests/billing/test_events.py", "tests/billing/test_webhooks.py")
# Money that goes back to the payer, and what an organization owes
RETURNS = ("tests/billing/test_refunds.py", "tests/billing/test_disputes.py", "tests/billing/test_receivables.py")
CHARGES = ("tests/billing/test_charges.py", "tests/billing/test_ledger.py")
AUTOMATIC = ("tests/billing/test_auto_topup.py",)
CUSTOMERS = ("tests/billing/test_customers.py",)
CURRENCIES = ("tests/billing/test_currencies.py",)
PROPERTY = ("tests/test_money_properties.py",)  # finds a mutant by random sequences of purchases and payments
PRICING = ("tests/billing/test_pricing.py",)
SWEEPS = ("tests/jobs/test_sweeps.py",)

MUTANTS = (
    Mutant("no signature check", "billing/gateway.py", "if not any(matches):", "if False:", EVENTS),
    Mutant("an event of the future is accepted", "billing/gateway.py", "if abs(time.time() - stamp)", "if (time.time() - stamp)", EVENTS),
    Mutant("only the first secret is accepted", "billing/gateway.py", "else list(settings.STRIPE_WEBHOOK_SECRETS)",
           "else list(settings.STRIPE_WEBHOOK_SECRETS)[:1]", EVENTS),
    Mutant("each event credits the payment again", "billing/payments.py", 'reference=f"top-up:{top_up.pk}",',
           'reference=f"top-up:{top_up.pk}:{timezone.now().timestamp()}",', EVENTS),
    Mutant("each event credits the payment again, seen by the property", "billing/payments.py", 'reference=f"top-up:{top_up.pk}",',
           'reference=f"top-up:{top_up.pk}:{timezone.now().timestamp()}",', PROPERTY),
    Mutant("no amount check", "billing/payments.py",
           '"amount_total": (session.get("amount_total"), top_up.amount_minor),', "", EVENTS),
    Mutant("no amount check, seen by the property", "billing/payments.py",
           '"amount_total": (session.get("amount_total"), top_up.amount_minor),', "", PROPERTY),
    Mutant("no currency check", "billing/payments.py",
           '"currency": (str(session.get("currency")).upper(), top_up.currency),', "", EVENTS),
    Mutant("no session check", "billing/payments.py",
           '"session": (session.get("id"), top_up.session_id or session.get("id")),', "", EVENTS),
    Mutant("no mode check", "billing/payments.py", '| {"livemode": (livemode, gateway.is_live())}', "", EVENTS),
    Mutant("unpaid is credited", "billing/payments.py", 'if session.get("payment_status") == "paid":', "if True:", EVENTS),
    Mutant("an event is applied twice", "billing/events.py",
           "            if locked.state not in states:\n                return\n", "", EVENTS + PROPERTY),
    Mutant("a broken event is not parked", "billing/events.py", "    except Exception as error:", "    except OSError as error:", EVENTS),
    Mutant("objects are not fetched from the provider", "billing/events.py",
           'if event.type not in HANDLERS or kind not in {"refund", "dispute", "customer"}:', "if True:", EVENTS + RETURNS + PROPERTY),
    Mutant("a fixed price buys any time", "billing/pricing.py", "    if extra > 0:", "    if False:", PRICING),
    Mutant("slow runs make a fixed price include more", "jobs/estimates.py",
           "return min(product.max_seconds, math.ceil(p90 * product.headroom))",
           "return min(product.max_seconds, math.ceil(max(float(p90), estimate(purchase).p90_seconds) * float(product.headroom)))",
           ("tests/jobs/test_orders.py",)),
    Mutant("no overdraft constraint",
           *dropped("ALTER TABLE billing_account DROP CONSTRAINT wallet_covers_what_is_held"), CHARGES),
    Mutant("entries need not sum to zero", *dropped("DROP TRIGGER billing_entries_balance ON billing_entry"), CHARGES),
    Mutant("entries can be changed", *dropped("DROP TRIGGER billing_entry_append_only ON billing_entry"), CHARGES),
    Mutant("settle is not idempotent", "billing/charges.py",
           "    if locked.state != Hold.States.HELD:\n        return locked.receipt\n", "", CHARGES),
    Mutant("the hold is not locked", "billing/charges.py",
           'locked = Hold.objects.select_for_update(of=("self",)).select_related("account", "quote")',
           'locked = Hold.objects.select_related("account", "quote")', CHARGES + PROPERTY),
    Mutant("an extension is held without a look at the budget", "billing/charges.py",
           "    for member in {locked.placed_by, user}:\n", "    for member in ():\n", CHARGES),
    Mutant("an extension reserves no credit", "billing/charges.py",
           "    credit.reserve_more(hold=locked, amount_minor=amount_minor)\n", "", CHARGES),
    Mutant("an extended run is charged up to its first ceiling", "billing/charges.py",
           ", ceiling_minor=hold.amount_minor)", ")", CHARGES),
    Mutant("two extensions of a notebook count from the same time", "jobs/notebooks.py",
           'if job.deadline_seconds != extends["deadline_seconds"]:', "if False:",
           ("tests/jobs/test_notebook_extensions.py",)),
    Mutant("a trial's money is held twice", "billing/charges.py", 'update(amount_minor=F("amount_minor") - quote.ceiling_minor)',
           'update(amount_minor=F("amount_minor"))', SWEEPS),
    Mutant("what a trial did not use does not go back", "billing/charges.py", 'F("amount_minor") + unused_minor',
           'F("amount_minor")', SWEEPS),
    Mutant("a trial passes what is left of the sweep's hold", "billing/charges.py",
           " or sweep_hold.amount_minor < quote.ceiling_minor", "", SWEEPS),
    Mutant("a trial's credit stays reserved for the sweep", "billing/charges.py",
           "    credit.move_reserved(source=sweep_hold, target=part, limit_minor=part.amount_minor)\n", "", SWEEPS + PROPERTY),
    Mutant("credit that a trial did not use is free for others", "billing/charges.py",
           "credit.spend(hold=locked, amount_minor=charge.total_minor, parent=parent)",
           "credit.spend(hold=locked, amount_minor=charge.total_minor)", SWEEPS + PROPERTY),
    Mutant("a sweep keeps its hold", "billing/charges.py",
           "    ledger.unhold(account=locked.account, amount_minor=locked.amount_minor)\n    credit.spend(hold=locked, amount_minor=0)",
           "    credit.spend(hold=locked, amount_minor=0)", SWEEPS),
    Mutant("a trial is ordered twice", "jobs/sweeps/progress.py", " or locked.trials.count() != number", "", SWEEPS + PROPERTY),
    Mutant("a stopped sweep orders more", "jobs/sweeps/progress.py", "locked.state != Sweep.States.RUNNING or ", "", PROPERTY),
    Mutant("two sweeps of a search are open at once", "jobs/sweeps/purchase.py", "if is_open or ", "if ", SWEEPS),
    Mutant("a hold does not look at the balance", "billing/ledger.py",
           ', posted_minor__gte=F("held_minor") + amount_minor', "", CHARGES),
    Mutant("a reference is posted twice", "billing/migrations/0012_move_function.py",
           "VALUES (of_reference, of_kind", "VALUES (left(of_reference || ':' || clock_timestamp(), 100), of_kind", CHARGES),
    Mutant("locks are taken in the caller's order", "billing/ledger.py",
           "accounts = [pk for _is_platform, pk in in_locking_order]", "accounts = list(amounts)", CHARGES),
    Mutant("simultaneous refunds are not added up", "billing/refunds.py",
           'TopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=top_up.pk)',
           'TopUp.objects.select_related("account").get(pk=top_up.pk)', RETURNS),
    Mutant("a failed refund does not return", "billing/refunds.py", "    if state == Refund.States.FAILED:", "    if False:", RETURNS),
    Mutant("a refund is made twice at the provider", "billing/gateway.py", 'f"refund-{reference}"', "os.urandom(8).hex()", RETURNS + PROPERTY),
    Mutant("a dispute freezes nothing", "billing/disputes.py", "    if amount > 0:\n        receivables", "    if False:\n        receivables",
           RETURNS),
    Mutant("a dispute that was won stays frozen", "billing/disputes.py", "    elif amount < 0:", "    elif False:", RETURNS),
    Mutant("only the first withdrawal of a dispute is booked", "billing/disputes.py", 'if transaction["id"] in booked_ids:',
           'if transaction["id"] in booked_ids or len(booked_ids) > 1:', RETURNS),
    Mutant("only the first withdrawal of a dispute is booked, seen by the property", "billing/disputes.py", 'if transaction["id"] in booked_ids:',
           'if transaction["id"] in booked_ids or len(booked_ids) > 1:', PROPERTY),
    Mutant("a dispute takes more than was paid", "billing/disputes.py",
           "if not 0 <= _withdrawn(row) <= top_up.amount_minor:", "if False:", RETURNS),
    Mutant("credit is paid out", "billing/receivables.py", "min(amount_minor, credit.paid_minor(locked))",
           "min(amount_minor, locked.available_minor)", RETURNS),
    Mutant("debts are forgotten", "billing/receivables.py", "    if payable:", "    if False:", RETURNS),
    Mutant("a form submitted twice refunds twice", "billing/refunds.py",
           "if key and (repeated := Refund.objects.filter(pk=key, top_up=locked).first()):", "if False and (repeated := None):",
           ("tests/billing/test_refunds.py", "tests/billing/test_admin.py")),
    Mutant("a credit note submitted twice is issued twice", "billing/invoices.py",
           "if notes_seen is not None and invoice.notes.count() != notes_seen:", "if False:",
           ("tests/billing/test_admin.py",)),
    Mutant("released money pays no debt", "billing/charges.py",
           '    receivables.collect(account=locked.account, reference=f"settle:{locked.reference}")\n', "", RETURNS),
    Mutant("a credit note pays no debt", "billing/invoices.py",
           '    receivables.collect(account=wallet, reference=f"credit-note:{note.sequence}")\n', "", RETURNS),
    Mutant("a refund whose event comes early is quarantined", "billing/refunds.py",
           'raise Parked(f"The refund of', 'raise Quarantined(f"The refund of', RETURNS),
    Mutant("a written-off debt is paid out when the money returns", "billing/receivables.py",
           "if is_return else 0", "if False else 0", RETURNS),
    Mutant("anyone may write debts off", "billing/receivables.py", 'if not user.has_perm("billing.add_writeoff"):',
           "if False:", RETURNS),
    Mutant("more is written off than is owed", "billing/receivables.py", "if not 1 <= amount_minor <= owed:", "if False:",
           RETURNS),
    Mutant("every currency has cents", "billing/currencies.py", "return 3 if currency in THREE_DECIMALS else 2", "return 2",
           CURRENCIES),
    Mutant("payments as fine as the minor unit", "billing/currencies.py",
           "return 10 if currency in THREE_DECIMALS else 1", "return 1", CURRENCIES),
    Mutant("an invoice is mailed twice", "console/accounts/emails.py",
           "if delivery.sent_at or (delivery.leased_until and delivery.leased_until > now):", "if delivery.sent_at:",
           ("tests/billing/test_emails.py",)),
    Mutant("a debt is not added to the payment of a quote", "billing/payments.py",
           "receivables.owed_minor(account) + storage_charges", "storage_charges", ("tests/billing/test_payments_api.py",)),
    Mutant("a lost answer charges again", "billing/auto_topup.py",
           "gateway.find_charge(reference=str(top_up.pk), customer_id=customer_id) if is_retry else None", "None", AUTOMATIC),
    Mutant("a deleted customer blocks payments", "billing/customers.py", "    forget(customer_id)\n    return call(ensure_customer(",
           "    return call(ensure_customer(", CUSTOMERS),
    Mutant("the key of a new customer is the deleted one's", "billing/gateway.py", 'f"{name} {email} {replaces}"',
           'f"{name} {email}"', CUSTOMERS),
    Mutant("a late event of a deleted customer forgets the new one", "billing/customers.py",
           "filter(mode=gateway.mode(), customer_id=customer_id)", "filter(mode=gateway.mode())", CUSTOMERS),
    Mutant("the deletion of a customer is not confirmed", "billing/events.py", 'customer.get("deleted") is True and',
           "True and", CUSTOMERS),
    Mutant("two automatic top-ups at a time", "billing/auto_topup.py",
           "setup = AutoTopUp.objects.select_for_update(of=(\"self\",))", "setup = AutoTopUp.objects",
           AUTOMATIC),
)  # fmt: skip


def copy(place: Path) -> None:
    """Copy the working tree without its data, with its environment."""
    skipped = shutil.ignore_patterns("var", ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, place, ignore=skipped)
    (place / ".venv").symlink_to(ROOT / ".venv")


def is_caught(mutant: Mutant, place: Path) -> bool:
    """Break the copy, run the tests and restore it. Return whether a test failed."""
    path = place / mutant.path
    original = path.read_text()
    if mutant.old not in original:
        raise SystemExit(f"{mutant.name}: {mutant.path} does not contain {mutant.old!r}")
    broken = original.replace(mutant.old, mutant.new)
    if "os.urandom" in mutant.new:  # in a module that does not import os
        broken = broken.replace("import hmac\n", "import hmac\nimport os\n", 1)
    path.write_text(broken)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(place)}
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
    finally:
        path.write_text(original)
    if done.returncode not in {0, 1}:
        raise SystemExit(f"{mutant.name}: the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"{'caught ' if done.returncode else 'SURVIVED'} {mutant.name}: {failed[:1]}", flush=True)
    return done.returncode == 1


def main() -> None:
    """Try every chosen mutant; exit with 1 if one survived."""
    word = os.environ.get("ONLY", "")
    chosen = [mutant for mutant in MUTANTS if word in mutant.name]
    with tempfile.TemporaryDirectory(prefix="ty-mut-") as name:
        place = Path(name) / "copy"
        copy(place)
        survivors = [mutant.name for mutant in chosen if not is_caught(mutant, place)]
    print(json.dumps({"mutants": len(chosen), "survived": survivors}))
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
