"""SAML 2.0 single sign-on: allauth's provider, with stricter checks. Installed only where SAML_PROVIDERS names one."""
