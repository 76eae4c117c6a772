"""The API of paying: saved cards, automatic top-ups, and what a quote lacks.

The one rule: card numbers never come here; a card is named by the payment provider's id, and saved at its page.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.urls import path, reverse
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing import automatic, customers, payments
from billing.api.wallet import TopUpSerializer, wallet_of
from billing.errors import NoSavedCard
from billing.models import AutoTopUp
from billing.quotes import quote_for, require_valid
from billing.wording import failure_sentence
from console.accounts.errors import InvalidInput, NotAllowed, NotFound
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.accounts.schema import results_of

NO_CARD = _("None of your saved cards has this id.")


class CardSerializer(serializers.Serializer[Any]):
    """A `SavedCard`, as much of it as is known here."""

    id = serializers.CharField(source="card.method_id")
    brand = serializers.CharField(source="card.brand")
    last4 = serializers.CharField(source="card.last4")
    expires = serializers.CharField(source="card.expires", help_text="MM/YY; empty for what is no card.")
    is_default = serializers.BooleanField()


class CardPageSerializer(serializers.Serializer[Any]):
    """Where a card is saved."""

    url = serializers.CharField(help_text="The payment provider's page, for a person to open.")


class AutomaticSerializer(serializers.Serializer[AutoTopUp]):
    """The standing order: when less than the threshold is available, the amount is paid in from the card."""

    is_on = serializers.BooleanField()
    threshold_minor = serializers.IntegerField()
    amount_minor = serializers.IntegerField()
    card = serializers.CharField(source="method_id")
    card_label = serializers.CharField(source="method_label")
    failures = serializers.IntegerField(help_text="In a row; after the third it is switched off.")
    last_failure = serializers.SerializerMethodField(help_text="In words; empty where nothing failed.")
    retry_at = serializers.DateTimeField(help_text="When a failed payment is tried again.")

    def get_last_failure(self, setup: AutoTopUp) -> str:
        """Why the last payment failed."""
        return failure_sentence(setup.last_failure) if setup.last_failure else ""


class AutomaticRequestSerializer(serializers.Serializer[Any]):
    """Switched off, nothing else is needed; switched on, everything is."""

    is_on = serializers.BooleanField()
    threshold_minor = serializers.IntegerField(required=False)
    amount_minor = serializers.IntegerField(required=False)
    card = serializers.CharField(required=False, max_length=255)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Raises ValidationError at each field that is missing."""
        missing = [name for name in ("threshold_minor", "amount_minor", "card") if name not in attrs]
        if attrs["is_on"] and missing:
            sentence = serializers.Field.default_error_messages["required"]
            raise serializers.ValidationError(dict.fromkeys(missing, sentence))
        return attrs


CARDS = results_of(CardSerializer)


class CardsView(TenantView):
    """Saved cards."""

    capabilities = {"GET": Capability.PAY, "POST": Capability.PAY}

    @extend_schema(operation_id="cards_list", responses=CARDS)
    def get(self, _request: Request) -> Response:
        """The cards, the one that is used first before the others."""
        return Response({"results": CardSerializer(customers.saved_cards(self.organization), many=True).data})

    @extend_schema(request=None, responses={201: CardPageSerializer})
    def post(self, _request: Request) -> Response:
        """Begin to save a card: the answer names the page where its number is typed. Nothing is paid there."""
        url = customers.save_card_page(account=wallet_of(self), email=self.membership.user.email)
        return Response({"url": url}, status=201)


class CardView(TenantView):
    """One saved card."""

    capabilities = {"DELETE": Capability.PAY}

    @extend_schema(responses={204: None})
    def delete(self, _request: Request, card: str) -> Response:
        """Forget a card; automatic top-ups from it are switched off."""
        try:
            customers.remove_card(organization=self.organization, method_id=card)
        except NoSavedCard:
            raise NotFound(NO_CARD) from None
        return Response(status=204)


class DefaultCardView(TenantView):
    """The card that is used first."""

    capabilities = {"POST": Capability.PAY}

    @extend_schema(request=None, responses=CARDS)
    def post(self, _request: Request, card: str) -> Response:
        """Use this card first. The answer is the list in its new order."""
        try:
            customers.make_default(organization=self.organization, method_id=card)
        except NoSavedCard:
            raise NotFound(NO_CARD) from None
        return Response({"results": CardSerializer(customers.saved_cards(self.organization), many=True).data})


class AutomaticView(TenantView):
    """Automatic top-ups."""

    capabilities = {"GET": Capability.PAY, "PUT": Capability.PAY}

    @extend_schema(responses={200: AutomaticSerializer, 204: None})
    def get(self, _request: Request) -> Response:
        """How the wallet is topped up by itself; 204 where that was never set."""
        setup = AutoTopUp.objects.filter(account=wallet_of(self)).first()
        return Response(status=204) if setup is None else Response(AutomaticSerializer(setup).data)

    @extend_schema(request=AutomaticRequestSerializer, responses={200: AutomaticSerializer, 204: None})
    def put(self, request: Request) -> Response:
        """Switch automatic top-ups on, change them, or switch them off."""
        form = AutomaticRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        wanted = form.validated_data
        if not wanted["is_on"]:
            automatic.switch_off(account=wallet_of(self))
            return self.get(request)
        try:
            automatic.switch_on(
                account=wallet_of(self),
                threshold_minor=wanted["threshold_minor"],
                amount_minor=wanted["amount_minor"],
                method_id=wanted["card"],
                user=self.membership.user,
            )
        except NoSavedCard:
            raise InvalidInput(fields={"card": NO_CARD}) from None
        return self.get(request)


class QuotePaymentView(TenantView):
    """What a wallet lacks for a quote."""

    capabilities = {"POST": Capability.PAY}

    @extend_schema(request=None, responses={201: TopUpSerializer})
    def post(self, _request: Request, quote_id: UUID) -> Response:
        """Begin to pay what the wallet lacks for a quote; it is bought, once, when the money has come in.

        The money is in the wallet whatever becomes of the quote. Whoever pays must be allowed to buy as well.
        """
        if not self.membership.allows(Capability.RUN):
            raise NotAllowed
        quote = quote_for(organization=self.organization, quote_id=quote_id)
        require_valid(quote)
        top_up = payments.pay_for(
            quote=quote,
            account=wallet_of(self),
            user=self.membership.user,
            return_path=reverse("training_paid", args=[quote.pk]),
        )
        return Response(TopUpSerializer(top_up).data, status=201)


urlpatterns = [
    path("wallet/cards/", CardsView.as_view(), name="api_cards"),
    path("wallet/cards/<str:card>/", CardView.as_view(), name="api_card"),
    path("wallet/cards/<str:card>/default/", DefaultCardView.as_view(), name="api_card_default"),
    path("wallet/automatic/", AutomaticView.as_view(), name="api_automatic"),
    path("quotes/<uuid:quote_id>/pay/", QuotePaymentView.as_view(), name="api_quote_pay"),
]
