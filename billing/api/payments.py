"""The REST API of payments: saved cards, automatic top-ups, payment for a quote.

Card numbers never reach the console: cards are saved on the provider's page and referred to by its ids.
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

from billing import auto_topup, customers, payments
from billing.api.wallet import TopUpSerializer, wallet_of_view
from billing.errors import NoSavedCard
from billing.messages import payment_failure_sentence
from billing.models import AutoTopUp
from billing.quotes import quote_for, require_valid
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.errors import InvalidInput, NotAllowed, NotFound
from console.core.schema import results_of

NO_CARD = _("There is no saved card with this ID.")


class CardSerializer(serializers.Serializer[Any]):
    """A saved card, or another saved payment method."""

    id = serializers.CharField(source="card.method_id")
    brand = serializers.CharField(source="card.brand")
    last4 = serializers.CharField(source="card.last4")
    expires = serializers.CharField(source="card.expires", help_text="MM/YY; empty for other payment methods.")
    is_default = serializers.BooleanField()


class CardPageSerializer(serializers.Serializer[Any]):
    """The payment provider's page on which a card is saved."""

    url = serializers.CharField(help_text="Page of the payment provider. Open it in a browser.")


class AutomaticSerializer(serializers.Serializer[AutoTopUp]):
    """Automatic top-up: if less than the threshold is available, the amount is charged to the card."""

    is_on = serializers.BooleanField()
    threshold_minor = serializers.IntegerField()
    amount_minor = serializers.IntegerField()
    card = serializers.CharField(source="method_id")
    card_label = serializers.CharField(source="method_label")
    failures = serializers.IntegerField(
        help_text="Failures in a row. After the third, automatic top-ups are switched off."
    )
    last_failure = serializers.SerializerMethodField(
        help_text="Reason of the last failure; empty if the last charge succeeded."
    )
    retry_at = serializers.DateTimeField(allow_null=True, help_text="Time of the next attempt after a failure.")

    def get_last_failure(self, setup: AutoTopUp) -> str:
        """Return why the last payment failed."""
        return payment_failure_sentence(setup.last_failure) if setup.last_failure else ""


class AutomaticRequestSerializer(serializers.Serializer[Any]):
    """Automatic top-up settings. Switching on requires all fields."""

    is_on = serializers.BooleanField()
    threshold_minor = serializers.IntegerField(required=False)
    amount_minor = serializers.IntegerField(required=False)
    card = serializers.CharField(required=False, max_length=255)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Require all fields when switching on."""
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
        """List the saved cards, the default first."""
        return Response({"results": CardSerializer(customers.saved_cards(self.organization), many=True).data})

    @extend_schema(request=None, responses={201: CardPageSerializer})
    def post(self, _request: Request) -> Response:
        """Start saving a card. Returns the URL of the provider's page; nothing is charged there."""
        url = customers.create_card_page(account=wallet_of_view(self), email=self.membership.user.email)
        return Response({"url": url}, status=201)


class CardView(TenantView):
    """One saved card."""

    capabilities = {"DELETE": Capability.PAY}

    @extend_schema(responses={204: None})
    def delete(self, _request: Request, card: str) -> Response:
        """Delete a saved card and switch off automatic top-ups that use it."""
        try:
            customers.remove_card(organization=self.organization, method_id=card)
        except NoSavedCard:
            raise NotFound(NO_CARD) from None
        return Response(status=204)


class DefaultCardView(TenantView):
    """The default card."""

    capabilities = {"POST": Capability.PAY}

    @extend_schema(request=None, responses=CARDS)
    def post(self, _request: Request, card: str) -> Response:
        """Make a card the default. Returns the list of cards."""
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
        """Return the automatic top-up settings, or 204 if there are none."""
        setup = AutoTopUp.objects.filter(account=wallet_of_view(self)).first()
        return Response(status=204) if setup is None else Response(AutomaticSerializer(setup).data)

    @extend_schema(request=AutomaticRequestSerializer, responses={200: AutomaticSerializer, 204: None})
    def put(self, request: Request) -> Response:
        """Switch automatic top-ups on or off, or change them."""
        form = AutomaticRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        wanted = form.validated_data
        if not wanted["is_on"]:
            auto_topup.switch_off(account=wallet_of_view(self))
            return self.get(request)
        try:
            auto_topup.switch_on(
                account=wallet_of_view(self),
                threshold_minor=wanted["threshold_minor"],
                amount_minor=wanted["amount_minor"],
                method_id=wanted["card"],
                user=self.membership.user,
            )
        except NoSavedCard:
            raise InvalidInput(fields={"card": NO_CARD}) from None
        return self.get(request)


class QuotePaymentView(TenantView):
    """Payment for a quote."""

    capabilities = {"POST": Capability.PAY}

    @extend_schema(request=None, responses={201: TopUpSerializer})
    def post(self, _request: Request, quote_id: UUID) -> Response:
        """Start a payment of the amount that the wallet lacks for a quote. Its arrival buys the quote.

        The payment stays in the wallet even if the quote is not bought. The payer must also be allowed to buy.
        """
        if not self.membership.allows(Capability.RUN):
            raise NotAllowed
        quote = quote_for(organization=self.organization, quote_id=quote_id)
        require_valid(quote)
        top_up = payments.pay_for(
            quote=quote,
            account=wallet_of_view(self),
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
