"""Lines of a job's receipt, and the kinds of its events."""

from billing.models import Receipt


def kinds(job):
    return list(job.events.values_list("kind", flat=True))


def lines(job):
    """Return the lines of a job's receipt by rule. Of several lines with one rule, only the last is in it."""
    receipt = Receipt.objects.get(hold__order__job=job)
    return {line["rule"]: line for line in receipt.lines}


def quantities(job, rule):
    receipt = Receipt.objects.get(hold__order__job=job)
    return [float(line["quantity"]) for line in receipt.lines if line["rule"] == rule]
