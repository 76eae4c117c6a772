"""Settings read from the environment: an invalid value stops the start with a sentence that names the setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http.request import validate_host

from console import notebook_url
from console.environment import Environment, host_of, neighbouring_port
from console.observability.logs import LEVELS

ROOT = Path(__file__).resolve().parent.parent.parent


def environment(**variables):
    """Return an environment that has only these variables."""
    env = Environment()
    env.ENVIRON = variables
    return env


@pytest.mark.parametrize(
    ("method", "value", "arguments", "sentence"),
    [
        ("whole_number", "two", (2,), "X is 'two'. It must be a whole number"),
        ("whole_number", "20GiB", (2,), "X is '20GiB'. It must be a whole number"),
        ("whole_number", "", (2,), "X is ''. It must be a whole number"),
        ("whole_number", "0", (2,), "X is 0. It must be at least 1"),
        ("number", "many", (2,), "X is 'many'. It must be a number above 0"),
        ("number", "nan", (2,), "X is 'nan'. It must be a number above 0"),
        ("number", "0", (2,), "X is '0'. It must be a number above 0"),
        ("switch", "enabled", (False,), "X is 'enabled'. It must be 1 or 0"),
        ("choice", "privat", ("private", ("private", "host")), "X is 'privat'. It must be one of: private, host"),
        ("hosts", "a.example.com, https://b.example.com", (), "X names 'https://b.example.com'. Name hosts only"),
        ("hosts", "@example.com", (), "X must not contain a user name, a password or an @"),
        ("hosts", "a.example.com, user:secret@host", (), "X must not contain a user name"),
        ("domains", "example.com, *.example.com", (), r"X names '\*.example.com'. Name whole domains"),
        ("domains", "example.com:25", (), "X names 'example.com:25'. Name whole domains"),
        ("domains", "@example.com", (), "X must not contain a user name, a password or an @"),
        ("web_address", "trainyard.example.com", (), "X is 'trainyard.example.com'. It must be http:// or https://"),
        ("web_address", "http://host:port", (), "X is 'http://host:port'"),
        ("web_address", "https://example.com/console", (), "X is 'https://example.com/console'"),
        ("web_address", "", (), "X is ''"),
        ("web_address", "https://user:secret@host", (), "X must not contain a user name"),
        ("web_addresses", "minio:9000", (), "X has 'minio:9000', which does not begin with http:// or https://"),
        ("web_addresses", "https://user:secret@minio:9000", (), "X must not contain a user name"),
        ("web_addresses", "https://user:sec,ret@minio:9000", (), "X must not contain a user name"),
        ("endpoint", "collector:4318", (), "X is 'collector:4318'. It must be http:// or https:// and a host"),
        ("endpoint", "http://user:secret@collector", (), "X must not contain a user name"),
        ("package_indexes", "pypi.example.com/simple", (), "X has 'pypi.example.com/simple'. Name addresses that"),
        ("package_indexes", "https://user:secret@host/simple", (), "X must not contain a user name"),
        ("bind_address", "0.0.0.0", ("127.0.0.1:8000",), r"X is '0.0.0.0'. It must be .* such as 127.0.0.1:8000"),
        ("time_zone", "Mars/Base", ("UTC",), "X is 'Mars/Base'. It must be an IANA time zone"),
        ("time_zone", "../etc", ("UTC",), "X is '../etc'"),
        ("database", "mysql://u:secret@host/name", ("",), "X is not an address of PostgreSQL"),
        ("database", "", ("",), "X is not an address of PostgreSQL"),
        ("redis_address", "localhost:6379", ("",), "X is not an address of Redis"),
        ("mail_server", "mail.example.com", (), "X is not the address of a mail server"),
        ("mail_server", "smtp://user:se/cret@host:587", (), "X is not the address of a mail server"),
    ],
)
def test_an_invalid_value_is_named_with_its_setting_and_without_its_password(method, value, arguments, sentence):
    with pytest.raises(ImproperlyConfigured, match=sentence) as error:
        getattr(environment(X=value), method)("X", *arguments)
    assert "secret" not in str(error.value).replace("/", "")


def test_valid_values_are_read():
    env = environment(
        ON="yes", OFF="Off", LIST=" a.example.com:8443, *.b.example.com, 例子.cn ,", URL="https://example.com:8443/",
        BIND="[::1]:8000", MAIL="smtp+tls://user:a%2Fb@mail.example.com:587", ZERO="0", ZONE="Asia/Shanghai",
        LEVEL="WARN", REDIS="rediss://:pass@cache:6380/0",
    )  # fmt: skip
    assert (env.switch("ON", False), env.switch("OFF", True), env.switch("MISSING", True)) == (True, False, True)
    assert env.hosts("LIST") == ["a.example.com:8443", "*.b.example.com", "例子.cn"]
    assert environment(X="Example.com, 例子.cn").domains("X") == ["example.com", "例子.cn"]
    assert env.web_address("URL") == "https://example.com:8443"
    assert environment(X="").web_address("X", "http://localhost", can_be_empty=True) == ""
    assert env.bind_address("BIND", "") == "[::1]:8000"
    assert environment(X="https://otlp.example.com/a").endpoint("X") == "https://otlp.example.com/a"
    indexes = ["https://pypi.org/simple", "file:///srv/wheels", "/srv/wheels"]
    assert environment(X=",".join(indexes)).package_indexes("X") == indexes
    assert (environment(X="").endpoint("X"), environment(X="").package_indexes("X")) == ("", [])
    assert env.mail_server("MAIL")["EMAIL_HOST_PASSWORD"] == "a/b"
    assert env.mail_server("MAIL")["EMAIL_USE_TLS"]
    assert env.mail_server("MISSING")["EMAIL_BACKEND"].endswith("console.EmailBackend")
    assert (env.whole_number("ZERO", 1, minimum=0), env.number("ZERO", 1, can_be_zero=True)) == (0, 0)
    assert env.time_zone("ZONE", "UTC") == "Asia/Shanghai"
    for scheme in ("postgres", "postgresql", "psql", "pgsql"):
        assert environment(X=f"{scheme}://user:a%2Fb@db/name").database("X", "")["PASSWORD"] == "a/b"
    assert env.redis_address("REDIS", "") == "rediss://:pass@cache:6380/0"
    assert env.choice("LEVEL", "INFO", LEVELS) == "WARN"


def test_a_host_is_named_as_in_requests():
    for url, host in (("https://Example.com:8443", "example.com"), ("http://[2001:DB8::1]:8000", "[2001:db8::1]")):
        assert host_of(url) == host
        assert validate_host(host, [host_of(url)])


def test_a_console_on_the_highest_port_gets_a_sandbox_below_it():
    assert [neighbouring_port(port) for port in (8000, 65534, 65535)] == [8001, 65535, 65534]


@pytest.mark.parametrize(
    ("console_url", "text", "url"),
    [
        ("http://127.0.0.1:9000", None, "http://localhost:9000"),
        ("http://127.0.0.1", None, "http://localhost"),
        ("http://127.0.0.1:80", None, "http://localhost"),
        ("https://console.example.com", "https://notebooks.example.net:443", "https://notebooks.example.net"),
        ("https://console.example.com", "https://notebooks.example.net:8443", "https://notebooks.example.net:8443"),
    ],
)
def test_the_url_of_notebooks_has_a_port_only_if_browsers_send_one(console_url, text, url):
    value = notebook_url.default(console_url) if text is None else text
    assert notebook_url.parse(value, console_url=console_url) == url


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("LOG_LEVEL", "LOUD", "LOG_LEVEL is 'LOUD'. It must be one of: CRITICAL"),
        ("SANDBOX_PORT", "80010", "SANDBOX_PORT is 80010. It must be at most 65535."),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318'."),
        ("PACKAGE_INDEXES", "pypi.example.com", "PACKAGE_INDEXES has 'pypi.example.com'. Name addresses"),
        ("NOTEBOOK_URL", "http://user:secret@host/x", "NOTEBOOK_URL must not contain a user name, a password or an @."),
    ],
)
def test_an_invalid_value_stops_every_command(tmp_path, name, value, sentence):
    # LOG_LEVEL is one of the last settings. If a module used Django's settings while they are read, Django would take
    # those read so far for all, and the command would go on.
    environ = os.environ | {"TRAINYARD_VAR": str(tmp_path), name: value}
    command = [sys.executable, "manage.py", "check"]
    answer = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert sentence in answer.stderr.splitlines()[-1]
