"""The API of billing. The one rule: what is served stands in `urlpatterns` of the area it is about."""

from billing.api import accounting, payments, wallet
from billing.api.wallet import LineSerializer, ReceiptSerializer

__all__ = ["LineSerializer", "ReceiptSerializer", "urlpatterns"]

urlpatterns = [*wallet.urlpatterns, *payments.urlpatterns, *accounting.urlpatterns]
