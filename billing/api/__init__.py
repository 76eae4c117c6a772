"""The REST API of billing. Each module has the `urlpatterns` of its area."""

from billing.api import accounting, payments, wallet
from billing.api.wallet import LineSerializer, ReceiptSerializer

__all__ = ["LineSerializer", "ReceiptSerializer", "urlpatterns"]

urlpatterns = [*wallet.urlpatterns, *payments.urlpatterns, *accounting.urlpatterns]
