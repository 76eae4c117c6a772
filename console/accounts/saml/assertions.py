"""Checks of an assertion that the SAML profile for browsers requires and python3-saml leaves out.

python3-saml verifies signatures, dates, issuer, audience and destination, but accepts an assertion that names no
audience, no recipient, no end or no request. Source: SAML 2.0 Profiles, sections 4.1.4.2 to 4.1.4.5.
"""

from __future__ import annotations

import hashlib
import time

from django.core.cache import cache
from onelogin.saml2.auth import OneLogin_Saml2_Auth
from onelogin.saml2.constants import OneLogin_Saml2_Constants as Saml
from onelogin.saml2.xml_utils import OneLogin_Saml2_XML as Xml

ASSERTION = "/samlp:Response/saml:Assertion"
"""The XPath of the assertion in a response."""
CLOCK_DRIFT_SECONDS = 300
"""How long python3-saml accepts an assertion after its end."""
MAX_SUBJECT_LENGTH = 191
"""The length of the column `uid` of allauth's accounts."""


class InvalidAssertion(Exception):
    """The assertion breaks a rule of the profile. The message names the rule, for the log."""


def require_profile(auth: OneLogin_Saml2_Auth) -> None:
    """Check the assertion of a valid response. Raises InvalidAssertion.

    Only the assertion is signed, so this function reads nothing outside it. python3-saml needs only one valid subject
    confirmation and does not tell which one it accepted. Therefore every confirmation must fulfil the rules here.
    """
    document = Xml.to_etree(auth.get_last_response_xml())
    if not Xml.query(document, f"{ASSERTION}/saml:Conditions/saml:AudienceRestriction/saml:Audience"):
        raise InvalidAssertion("It names no audience.")
    request_id = auth.get_last_response_in_response_to()  # None in a log-in that the provider started
    for confirmation in Xml.query(document, f"{ASSERTION}/saml:Subject/saml:SubjectConfirmation"):
        data = confirmation.find("saml:SubjectConfirmationData", namespaces=Saml.NSMAP)
        if data is None or not data.get("Recipient") or not data.get("NotOnOrAfter"):
            raise InvalidAssertion("Its subject confirmation lacks a recipient or an end.")
        if data.get("InResponseTo") != request_id:
            raise InvalidAssertion("Its subject confirmation answers another request than the response.")


def require_lasting_subject(auth: OneLogin_Saml2_Auth, *, subject: str | None) -> None:
    """Check that `subject` can identify the same person at each log-in. Raises InvalidAssertion."""
    if not subject or len(subject) > MAX_SUBJECT_LENGTH:
        raise InvalidAssertion("It names no subject, or one that is too long.")
    if subject == auth.get_nameid() and auth.get_nameid_format() == Saml.NAMEID_TRANSIENT:
        raise InvalidAssertion(
            "Its NameID is transient. Set `id_attribute`, or let the provider send a persistent one."
        )


def require_first_use(auth: OneLogin_Saml2_Auth, *, issuer: str) -> None:
    """Remember the assertion until it ends. Raises InvalidAssertion for one that was used before.

    An assertion that answers a request of the console cannot be replayed anyway, because the request ends with the
    log-in. But in a log-in that the provider started, the assertion answers no request.
    """
    digest = hashlib.sha256(f"{issuer} {auth.get_last_assertion_id()}".encode()).hexdigest()
    seconds = auth.get_last_assertion_not_on_or_after() - int(time.time()) + CLOCK_DRIFT_SECONDS
    if not cache.add(f"saml_assertion:{digest}", 1, seconds):
        raise InvalidAssertion("It was used before.")
