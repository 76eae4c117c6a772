"""A SAML identity provider: pysaml2, not the library of the console. It signs by the program xmlsec1."""

import base64
import copy
import datetime as dt
import json
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from lxml import etree
from onelogin.saml2.utils import OneLogin_Saml2_Utils

from console import sign_in

ENTITY_ID, SSO_URL = "https://idp.example.com/metadata", "https://idp.example.com/sso"
PERSISTENT = "urn:oasis:names:tc:SAML:2.0:nameid-format:persistent"
URI_NAMES = {"name_form": "urn:oasis:names:tc:SAML:2.0:attrname-format:uri"}
"""The part of a provider's policy that says how it names attributes: by URIs."""
NAMESPACES = {
    "samlp": "urn:oasis:names:tc:SAML:2.0:protocol",
    "saml": "urn:oasis:names:tc:SAML:2.0:assertion",
    "ds": "http://www.w3.org/2000/09/xmldsig#",
}


@cache
def pysaml2() -> ModuleType:
    """Import pysaml2 on first use: that takes two seconds, and every test process imports this module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pysaml2 uses an old name of `cryptography`
        for name in ("assertion", "authn_context", "config", "saml", "server", "sigver", "xmldsig"):
            import_module(f"saml2.{name}")
    return import_module("saml2")


def configure(settings, certificate: str, console_url: str, **fields) -> None:
    """Let the console at `console_url` trust the provider with this certificate."""
    entry = {
        "id": "acme", "name": "Acme", "entity_id": ENTITY_ID, "sso_url": SSO_URL, "certificate": certificate,
        "verified_domains": ["trusted.example.com"],
    }  # fmt: skip
    settings.SAML_PROVIDERS = sign_in.parse_saml_providers(json.dumps([entry | fields]), console_url=console_url)
    settings.SOCIALACCOUNT_PROVIDERS = {"saml": {"APPS": settings.SAML_PROVIDERS}}


class IdentityProvider:
    """Answers requests to log in, for the person that a test names."""

    def __init__(self, folder: Path, sso_url: str = SSO_URL):
        self.certificate, self.key = _write_key(folder)
        self.knows_console = False  # whether `read_metadata` was called
        saml2 = pysaml2()
        self._server = saml2.server.Server(
            config=saml2.config.IdPConfig().load({
                "entityid": ENTITY_ID,
                "key_file": str(folder / "key.pem"),
                "cert_file": str(folder / "cert.pem"),
                "xmlsec_binary": saml2.sigver.get_xmlsec_binary(),
                "service": {
                    "idp": {
                        "endpoints": {"single_sign_on_service": [(sso_url, saml2.BINDING_HTTP_REDIRECT)]},
                        "policy": {"default": URI_NAMES},
                    },
                },
            })
        )  # fmt: skip

    def read_metadata(self, text: str):
        """Learn who the console is, from its metadata."""
        self._server.metadata = self._server.config.load_metadata({"inline": [text]})
        self.knows_console = True

    def read_request(self, url: str):
        """The console's request to log in, from the address to which it sends a browser."""
        text = parse_qs(urlsplit(url).query)["SAMLRequest"][0]
        return self._server.parse_authn_request(text, pysaml2().BINDING_HTTP_REDIRECT).message

    def answer(self, request, *, email, subject, name_format=PERSISTENT, **changes) -> str:
        """A response to a request, as XML. `changes` are arguments of pysaml2."""
        saml2 = pysaml2()
        values = {
            "identity": {"mail": [email]},
            "in_response_to": request.id,
            "destination": request.assertion_consumer_service_url,
            "sp_entity_id": request.issuer.text,
            "name_id": saml2.saml.NameID(format=name_format, text=subject),
            "authn": {"class_ref": saml2.authn_context.PASSWORD, "authn_auth": ENTITY_ID},
            "sign_assertion": True,
            "sign_alg": saml2.xmldsig.SIG_RSA_SHA256,
            "digest_alg": saml2.xmldsig.DIGEST_SHA256,
        }
        return str(self._server.create_authn_response(**values | changes))

    def read_id(self, xml: str) -> str:
        """The ID of the request that a response answers."""
        return _parse(xml)[0].get("InResponseTo")

    def sign_changed(self, xml: str, change) -> str:
        """Change the assertion of a response with `change`, and sign it again, which only the key's owner can do."""
        response, assertion = _parse(xml)
        change(assertion)
        signature = assertion.find("ds:Signature", NAMESPACES)
        if signature is not None:
            assertion.remove(signature)
        alone = etree.tostring(copy.deepcopy(assertion))
        signed = OneLogin_Saml2_Utils.add_sign(alone, self.key, self.certificate).decode()
        # Insert it as text: lxml changes the namespace prefixes of elements that it moves, which breaks the signature.
        response.replace(assertion, etree.Comment("signed"))
        return etree.tostring(response).decode().replace("<!--signed-->", signed)


def ended_policy():
    """The policy of assertions that ended ten minutes ago."""
    return pysaml2().assertion.Policy({"default": URI_NAMES | {"lifetime": {"minutes": -10}}})


def wrap(xml: str, *, email: str, place: str) -> str:
    """Hide the signed assertion behind a forged one about `email` (XML signature wrapping).

    `place` is where the signed one goes: beside the forged one, inside it, into extensions or into the signature.
    """
    response, signed = _parse(xml)
    forged = copy.deepcopy(signed)
    forged.set("ID", "forged")
    forged.remove(forged.find("ds:Signature", NAMESPACES))
    forged.find(".//saml:AttributeValue", NAMESPACES).text = email
    forged.find(".//saml:NameID", NAMESPACES).text = email
    response.replace(signed, forged)
    match place:
        case "before":
            forged.addprevious(signed)
        case "after":
            forged.addnext(signed)
        case "inside":
            forged.append(signed)
        case "extensions":
            extensions = etree.Element(f"{{{NAMESPACES['samlp']}}}Extensions")
            extensions.append(signed)
            response.find("saml:Issuer", NAMESPACES).addnext(extensions)
        case "signature":
            signature = signed.find("ds:Signature", NAMESPACES)
            signed.remove(signature)
            etree.SubElement(signature, f"{{{NAMESPACES['ds']}}}Object").append(signed)
            forged.find("saml:Issuer", NAMESPACES).addnext(signature)
    return etree.tostring(response).decode()


def encode(xml: str) -> str:
    """A response as the browser's form carries it."""
    return base64.b64encode(xml.encode()).decode()


def _parse(xml: str):
    response = etree.fromstring(xml.encode())
    return response, response.find("saml:Assertion", NAMESPACES)


def _write_key(folder: Path) -> tuple[str, str]:
    """Write a certificate and its key in PEM, and return both."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "idp.example.com")])
    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=1)
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, end)
    certificate = unsigned.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return (folder / "cert.pem").read_text(), private.decode()
