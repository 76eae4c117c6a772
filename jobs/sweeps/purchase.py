"""Quote, buy and stop sweeps, and quote extensions, which are bought as sweeps too. `progress` orders the trials.

A search is a first sweep and the sweeps that extend it. All its trials have the same search space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from billing import charges
from billing.models import Quote
from billing.quotes import current_prices, make_sweep_quote, price, require_valid
from console.accounts.models import Membership, Organization, User
from console.accounts.services import record_audit_event, require_active
from console.core.enqueue import send_on_commit
from console.core.errors import InvalidInput
from jobs import estimates, quotas
from jobs.details import default_name
from jobs.errors import AlreadyEnded, ChoiceUnavailable, IdempotencyConflict, QuoteBought
from jobs.models import Sweep, Trial
from jobs.orders import normalize_reason, pinned_image, pricing_inputs
from jobs.purchase import parse
from jobs.sweeps import selectors
from jobs.sweeps.plan import (
    MAX_TRIALS,
    PURCHASE_FIELDS,
    ExtensionSerializer,
    Plan,
    apply_parameters,
    extreme_values,
    parse_plan,
)
from jobs.sweeps.progress import advance_sweep
from jobs.sweeps.suggestions import Method


def quote_sweep(*, membership: Membership, data: Mapping[str, Any]) -> Quote:
    """Price a sweep. `data` has the API's fields of a purchase and of `PlanSerializer`.

    `ceiling_minor` limits the whole sweep. Fields of the purchase that are parameters of the search may be left out.
    Raises ServiceInactive, InvalidInput, and billing's errors.
    """
    organization = membership.organization
    require_active(organization=organization)
    plan = parse_plan(data)
    # Fields that the search sets may be missing in `data`. Any value of the space then makes the purchase complete.
    example = extreme_values(Plan.from_json(plan).space)[0]
    searched_fields = {PURCHASE_FIELDS[name]: value for name, value in example.items() if name in PURCHASE_FIELDS}
    # `exact` is ignored: a sweep changes parameters, so no trial can repeat a job exactly.
    purchase = parse(organization=organization, data={**searched_fields, **_without_empty(data), "exact": False})
    trial_purchase = {**purchase.to_json(), "ceiling_minor": None}  # the ceiling is the sweep's, not that of each trial
    return _make_quote(
        membership=membership,
        trial_purchase=trial_purchase,
        plan_json=plan,
        pinned_image=pinned_image(organization, purchase.image),
        ceiling_minor=purchase.ceiling_minor,
    )


def quote_extension(*, membership: Membership, sweep: Sweep, data: Mapping[str, Any]) -> Quote:
    """Price more trials of the search of `sweep`. `data` has `trials`, `ceiling_minor`, or both.

    All else stays as it was bought. All sweeps of the search must have ended. Raises ServiceInactive, InvalidInput, and
    billing's errors.
    """
    organization = membership.organization
    require_active(organization=organization)
    limits = ExtensionSerializer(data=data).values()
    first_sweep = sweep.extends or sweep
    search_sweeps = selectors.sweeps_of_search(first_sweep.pk)
    if search_sweeps.filter(ended_at=None).exists():
        raise InvalidInput(fields={"trials": _("A sweep of this search is open. Wait for it to end, or stop it.")})
    tried = Trial.objects.filter(sweep__in=search_sweeps).count()
    first_purchase = first_sweep.quote.purchase
    extension = first_purchase["sweep"] | {"trials": min(limits["trials"], MAX_TRIALS - tried)}
    extension |= {"tried": tried, "extends": first_sweep.pk}
    if extension["method"] == Method.GRID:  # at most the combinations that no trial has tried yet
        extension["trials"] = len(Plan.from_json(extension).grid())
    if extension["trials"] < 1:
        raise InvalidInput(fields={"trials": _("This search has tried all its trials.")})
    trial_purchase = {name: value for name, value in first_purchase.items() if name not in {"sweep", "pinned_image"}}
    # Only for its errors: a dataset, for example, may have been deleted since the first sweep.
    parse(organization=organization, data=trial_purchase, uses_given_versions=True)
    return _make_quote(
        membership=membership,
        trial_purchase=trial_purchase,
        plan_json=extension,
        pinned_image={"pinned_image": first_purchase["pinned_image"]},  # so that all trials of a search use one image
        ceiling_minor=limits["ceiling_minor"],
    )


def _make_quote(
    *,
    membership: Membership,
    trial_purchase: Mapping[str, Any],
    plan_json: Mapping[str, Any],
    pinned_image: Mapping[str, Any],
    ceiling_minor: int | None,
) -> Quote:
    """Price a sweep and store its quote.

    `trial_purchase` is the purchase of its trials, before a trial's parameters are applied. `plan_json` is the plan as
    `Plan.from_json` reads it. `pinned_image` is the field that `orders.pinned_image` returns.
    """
    organization = membership.organization
    plan = Plan.from_json(plan_json)
    prices = current_prices(organization)
    # The most expensive trial that the space allows sets the ceiling, and `extreme_values` includes it.
    offers = []
    for values in extreme_values(plan.space):
        try:
            data = apply_parameters(trial_purchase, values)
            purchase = parse(organization=organization, data=data, uses_given_versions=True)
        except InvalidInput as error:
            # `trial_purchase` was validated before, so the parameters are at fault.
            raise InvalidInput(fields={"space": " ".join(map(str, error.fields.values()))}) from error
        estimate = estimates.estimate(purchase)
        offers.append((price(prices, **pricing_inputs(purchase, estimate)), estimate))
    return make_sweep_quote(
        organization=organization,
        user=membership.user,
        prices=prices,
        payload={**trial_purchase, "sweep": plan_json, **pinned_image},
        offers=offers,
        trials=plan.trials,
        ceiling_minor=ceiling_minor,
    )


def _without_empty(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value. A form sends an empty string for a field that was left out."""
    return {name: value for name, value in data.items() if value not in ("", None)}


def place_sweep(*, membership: Membership, quote: Quote, idempotency_key: str = "") -> Sweep:
    """Buy a sweep's quote: hold its ceiling and order its first trials. A repeated key returns the same sweep.

    Raises ServiceInactive, QuoteExpired, QuoteBought, IdempotencyConflict, ChoiceUnavailable, InsufficientFunds,
    BudgetExceeded, and InvalidInput if the quote is not one of a sweep.
    """
    organization = membership.organization
    key = idempotency_key or f"quote:{quote.pk}"
    if sweep := _existing_sweep(organization, quote, key):
        return sweep  # before the checks: a repeated request succeeds even if the quote has expired since
    require_active(organization=organization)
    if "sweep" not in quote.purchase:
        raise InvalidInput(fields={"quote": _("This quote is not for a sweep. Buy it as a run.")})
    require_valid(quote)
    purchase = quote.purchase
    try:
        # Parsed again: since the quote, the customer may have deleted something, or the operator withdrawn the product.
        product = parse(organization=organization, data=purchase, uses_given_versions=True).product
    except InvalidInput as error:
        raise ChoiceUnavailable(fields=error.fields) from error
    with transaction.atomic():
        quotas.lock_quota(organization)
        # Checked again under the lock, because a concurrent request may have bought the quote meanwhile.
        if sweep := _existing_sweep(organization, quote, key):
            return sweep
        extends = _extended_sweep(purchase["sweep"])
        hold = charges.hold(
            quote=quote,
            reference=f"sweep:{quote.pk}",
            user=membership.user,
            labels={name: purchase[name] for name in ("workspace", "node_spec", "product")},
        )
        sweep = Sweep.objects.create(
            organization=organization,
            quote=quote,
            hold=hold,
            extends=extends,
            product=product,
            name=purchase["name"] or default_name(purchase["code_path"]),
            idempotency_key=key,
            placed_by=membership.user,
        )
        record_audit_event(
            organization=organization, actor=membership.user, action="sweep.placed", target=f"sweep:{sweep.pk}"
        )
        send_on_commit(advance_sweep, sweep.pk)
    return sweep


def _extended_sweep(plan_json: Mapping[str, Any]) -> Sweep | None:
    """Return the first sweep of the search that a stored plan extends; None if it extends none.

    The caller has locked the quota. Only one sweep of a search may be open, so that each learns from all earlier
    trials. Raises ChoiceUnavailable if one is open, or if trials were added since the quote.
    """
    if "extends" not in plan_json:
        return None
    search_sweeps = selectors.sweeps_of_search(plan_json["extends"])
    is_open = search_sweeps.filter(ended_at=None).exists()
    if is_open or Trial.objects.filter(sweep__in=search_sweeps).count() != plan_json["tried"]:
        raise ChoiceUnavailable
    return Sweep.objects.get(pk=plan_json["extends"])


def stop_sweep(*, membership: Membership, sweep: Sweep) -> Sweep:
    """Start no more trials of a sweep, and cancel the open ones, whose used time is charged. Safe to repeat.

    Raises AlreadyEnded.
    """
    return _stop(sweep, actor=membership.user, action="sweep.stopped")


def stop_sweep_as_operator(*, actor: User, sweep: Sweep, why: str) -> Sweep:
    """Stop a customer's sweep as `stop_sweep` does. The audit log says that an administrator stopped it, and why.

    Safe to repeat. Raises InvalidInput (`why`), AlreadyEnded.
    """
    return _stop(sweep, actor=actor, action="sweep.stopped_by_operator", data={"why": normalize_reason(why)})


def _stop(sweep: Sweep, *, actor: User, action: str, data: Mapping[str, Any] | None = None) -> Sweep:
    """Stop a sweep as `stop_sweep` does, and write the audit log entry `action`. Raises AlreadyEnded."""
    with transaction.atomic():
        sweep = Sweep.objects.select_for_update().get(pk=sweep.pk)
        if sweep.state == Sweep.States.ENDED:
            raise AlreadyEnded(_("This sweep has already ended."))
        if sweep.reason != Sweep.Reasons.STOPPED:
            sweep.state, sweep.reason = Sweep.States.STOPPING, Sweep.Reasons.STOPPED
            sweep.save(update_fields=["state", "reason"])
            record_audit_event(
                organization=sweep.organization, actor=actor, action=action, target=f"sweep:{sweep.pk}", data=data or {}
            )
        send_on_commit(advance_sweep, sweep.pk)
    return sweep


def _existing_sweep(organization: Organization, quote: Quote, key: str) -> Sweep | None:
    """Return the sweep that this idempotency key bought for this quote; None if neither was used before.

    Raises QuoteBought, IdempotencyConflict.
    """
    matching_sweeps = Sweep.objects.filter(Q(quote=quote) | Q(organization=organization, idempotency_key=key))
    sweeps = {sweep.quote_id: sweep for sweep in matching_sweeps}
    if sweep := sweeps.get(quote.pk):
        if sweep.idempotency_key != key:
            raise QuoteBought
        return sweep
    if sweeps:
        raise IdempotencyConflict
    return None
