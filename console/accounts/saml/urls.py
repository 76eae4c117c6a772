"""The addresses of SAML. allauth includes this module for the provider and looks the names up."""

from allauth.socialaccount.providers.saml import views as allauth_views
from django.urls import include, path

from console.accounts.saml import views

urlpatterns = [
    path(
        "saml/<slug:organization_slug>/",
        include(
            [
                path("login/", allauth_views.login, name="saml_login"),
                path("acs/", views.receive_response, name="saml_acs"),
                path("acs/finish/", views.check_response, name="saml_finish_acs"),
                path("metadata/", views.metadata, name="saml_metadata"),
                path("sls/", views.log_out, name="saml_sls"),
            ]
        ),
    ),
]
