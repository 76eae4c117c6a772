"""Does the suite notice? `make mutants` breaks a copy of the code in one way at a time, and sees tests fail.

Each mutant is a rule of the money that somebody might drop. Slow (minutes), so no part of the tests themselves.
`ONLY=<word>` takes those whose name has the word. The last line is one JSON object.
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

HOUSE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One rule less: `old` becomes `new` in `path`, and one of `tests` must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def dropped(statement: str) -> tuple[str, str, str]:
    """A rule of the database's that is gone."""
    return "billing/migrations/0012_move_function.py", 'END $$;\n"""', f'END $$;\n{statement};\n"""'


EVENTS = ("tests/billing/test_gateway.py", "tests/billing/test_events.py", "tests/billing/test_webhooks.py")
BACK = ("tests/billing/test_reversals.py", "tests/billing/test_disputes.py", "tests/billing/test_receivables.py")
CHARGES = ("tests/billing/test_charges.py", "tests/billing/test_ledger.py")
AUTOMATIC = ("tests/billing/test_automatic.py",)
CUSTOMERS = ("tests/billing/test_customers.py",)
CURRENCIES = ("tests/billing/test_currencies.py",)
PROPERTY = ("tests/test_money_properties.py",)

MUTANTS = (
    Mutant("no signature check", "billing/gateway.py", "if not any(matches):", "if False:", EVENTS),
    Mutant("the future is believed", "billing/gateway.py", "if abs(time.time() - stamp)", "if (time.time() - stamp)", EVENTS),
    Mutant("one secret alone", "billing/gateway.py", "else list(settings.STRIPE_WEBHOOK_SECRETS)",
           "else list(settings.STRIPE_WEBHOOK_SECRETS)[:1]", EVENTS),
    Mutant("credit keyed on the event", "billing/payments.py", 'reference=f"top-up:{top_up.pk}",',
           'reference=f"top-up:{top_up.pk}:{timezone.now().timestamp()}",', EVENTS),
    Mutant("credit keyed on the event, seen by the property", "billing/payments.py", 'reference=f"top-up:{top_up.pk}",',
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
    Mutant("an event is acted on again", "billing/events.py",
           "            if locked.state not in states:\n                return\n", "", EVENTS + PROPERTY),
    Mutant("poison is not parked", "billing/events.py", "    except Exception as error:", "    except OSError as error:", EVENTS),
    Mutant("events are believed, not asked about", "billing/events.py",
           'if event.type not in HANDLERS or kind not in {"refund", "dispute"}:', "if True:", EVENTS + BACK + PROPERTY),
    Mutant("no overdraft constraint",
           *dropped("ALTER TABLE billing_account DROP CONSTRAINT wallet_covers_what_is_held"), CHARGES),
    Mutant("entries need not sum to zero", *dropped("DROP TRIGGER billing_entries_balance ON billing_entry"), CHARGES),
    Mutant("entries can be changed", *dropped("DROP TRIGGER billing_entry_append_only ON billing_entry"), CHARGES),
    Mutant("settle is not idempotent", "billing/charges.py",
           "    if locked.state != Hold.States.HELD:\n        return locked.receipt\n", "", CHARGES),
    Mutant("the hold is not locked", "billing/charges.py", 'Hold.objects.select_for_update(of=("self",))', "Hold.objects",
           CHARGES + PROPERTY),
    Mutant("a hold does not look at the balance", "billing/ledger.py",
           ', posted_minor__gte=F("held_minor") + amount_minor', "", CHARGES),
    Mutant("a reference is posted twice", "billing/migrations/0012_move_function.py",
           "VALUES (of_reference, of_kind", "VALUES (left(of_reference || ':' || clock_timestamp(), 100), of_kind", CHARGES),
    Mutant("locks are taken in the caller's order", "billing/ledger.py",
           "accounts = [pk for _is_platform, pk in in_locking_order]", "accounts = list(parts)", CHARGES),
    Mutant("refunds are not counted together", "billing/reversals.py",
           'TopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=top_up.pk)',
           'TopUp.objects.select_related("account").get(pk=top_up.pk)', BACK),
    Mutant("a failed refund stays gone", "billing/reversals.py", "    if state == Refund.States.FAILED:", "    if False:", BACK),
    Mutant("a refund is told twice", "billing/gateway.py", 'f"refund-{reference}"', "os.urandom(8).hex()", BACK + PROPERTY),
    Mutant("a dispute freezes nothing", "billing/disputes.py", "    if amount > 0:\n        receivables", "    if False:\n        receivables",
           BACK),
    Mutant("a dispute that was won stays frozen", "billing/disputes.py", "    elif amount < 0:", "    elif False:", BACK),
    Mutant("a dispute takes once, whatever moves", "billing/disputes.py", 'if each["id"] in seen:',
           'if each["id"] in seen or len(seen) > 1:', BACK),
    Mutant("a dispute takes once, seen by the property", "billing/disputes.py", 'if each["id"] in seen:',
           'if each["id"] in seen or len(seen) > 1:', PROPERTY),
    Mutant("a dispute takes more than was paid", "billing/disputes.py",
           "if not 0 <= _withdrawn(row) <= top_up.amount_minor:", "if False:", BACK),
    Mutant("credit is paid out", "billing/receivables.py", "min(amount_minor, credit.paid_minor(locked))",
           "min(amount_minor, locked.available_minor)", BACK),
    Mutant("debts are forgotten", "billing/receivables.py", "    if due:", "    if False:", BACK),
    Mutant("a form that is sent twice pays back twice", "billing/reversals.py",
           "if key and (known := Refund.objects.filter(pk=key, top_up=locked).first()):", "if False and (known := None):",
           ("tests/billing/test_reversals.py", "tests/billing/test_admin.py")),
    Mutant("a credit note that is sent twice gives back twice", "billing/invoices.py",
           "if after is not None and invoice.notes.count() != after:", "if False:",
           ("tests/billing/test_admin_accounting.py",)),
    Mutant("what is held no more pays no debt", "billing/charges.py",
           '    receivables.collect(account=locked.account, reference=f"settle:{locked.reference}")\n', "", BACK),
    Mutant("a credit note pays no debt", "billing/invoices.py",
           '    receivables.collect(account=wallet, reference=f"credit-note:{note.sequence}")\n', "", BACK),
    Mutant("a refund that is told early is left to a person", "billing/reversals.py",
           'raise Parked(f"More is paid back', 'raise Quarantined(f"More is paid back', BACK),
    Mutant("a debt that was written off is paid out when the money returns", "billing/receivables.py",
           "if returns else 0", "if False else 0", BACK),
    Mutant("anybody writes debts off", "billing/receivables.py", 'if not user.has_perm("billing.add_writeoff"):',
           "if False:", BACK),
    Mutant("more is written off than is owed", "billing/receivables.py", "if not 1 <= amount_minor <= owed:", "if False:",
           BACK),
    Mutant("every currency has cents", "billing/currencies.py", "return 3 if currency in THREE_DECIMALS else 2", "return 2",
           CURRENCIES),
    Mutant("payments as fine as the minor unit", "billing/currencies.py",
           "return 10 if currency in THREE_DECIMALS else 1", "return 1", CURRENCIES),
    Mutant("an invoice is told twice", "billing/mails.py",
           "if not rows.filter(mailed_at=None).update(mailed_at=timezone.now()):",
           "if not rows.update(mailed_at=timezone.now()):", ("tests/billing/test_mails.py",)),
    Mutant("what is owed is not paid with a quote", "billing/payments.py",
           "quote.ceiling_minor - account.available_minor + receivables.owed_minor(account)",
           "quote.ceiling_minor - account.available_minor", ("tests/billing/test_payments_api.py",)),
    Mutant("a lost answer charges again", "billing/automatic.py",
           "gateway.charge_with(reference=str(top_up.pk), customer=theirs) if again else None", "None", AUTOMATIC),
    Mutant("a deleted customer blocks payments", "billing/customers.py", "    forget(known)\n    return act(customer_of(",
           "    return act(customer_of(", CUSTOMERS),
    Mutant("the key of a new customer is the deleted one's", "billing/gateway.py", 'f"{name} {email} {after}"',
           'f"{name} {email}"', CUSTOMERS),
    Mutant("a late word of a deleted customer takes the new one's cards", "billing/customers.py",
           "filter(mode=gateway.mode(), customer_id=gone)", "filter(mode=gateway.mode())", CUSTOMERS),
    Mutant("what is told of a deleted customer is believed", "billing/events.py", 'found.get("deleted") is True and',
           "True and", CUSTOMERS),
    Mutant("two automatic top-ups at a time", "billing/automatic.py",
           "setup = AutoTopUp.objects.select_for_update(of=(\"self\",))", "setup = AutoTopUp.objects",
           AUTOMATIC),
)  # fmt: skip


def copy(place: Path) -> None:
    """The working tree without its data, with the environment it was installed in."""
    skipped = shutil.ignore_patterns("var", ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(HOUSE, place, ignore=skipped)
    (place / ".venv").symlink_to(HOUSE / ".venv")


def is_caught(mutant: Mutant, place: Path) -> bool:
    """Break the copy, run the tests, mend it. Whether a test failed."""
    path = place / mutant.path
    whole = path.read_text()
    if mutant.old not in whole:
        raise SystemExit(f"{mutant.name}: {mutant.path} does not have {mutant.old!r} any more")
    broken = whole.replace(mutant.old, mutant.new)
    if "os.urandom" in mutant.new:
        broken = broken.replace("import hmac\n", "import hmac\nimport os\n", 1)
    path.write_text(broken)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(place)}
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
    finally:
        path.write_text(whole)
    if done.returncode not in {0, 1}:
        raise SystemExit(f"{mutant.name}: the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"{'caught ' if done.returncode else 'SURVIVED'} {mutant.name}: {failed[:1]}", flush=True)
    return done.returncode == 1


def main() -> None:
    """Every mutant; exits with 1 where one survived."""
    word = os.environ.get("ONLY", "")
    chosen = [mutant for mutant in MUTANTS if word in mutant.name]
    with tempfile.TemporaryDirectory(prefix="ty-mut-") as name:
        place = Path(name) / "house"
        copy(place)
        survivors = [mutant.name for mutant in chosen if not is_caught(mutant, place)]
    print(json.dumps({"mutants": len(chosen), "survived": survivors}))
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
