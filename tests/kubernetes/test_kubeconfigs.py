"""The forms in which a kubeconfig says who one is and whom one trusts, each through our own client."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.backends.kubernetes_api import Api, path_of
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.errors import BackendUnavailable
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.certificates import certificates
from tests.kubernetes.sites import write_kubeconfig


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer(secure=True)
    yield made
    made.close()


def api(path: Path) -> Api:
    volume = {"host_path": "/data", "root": "/data"}
    return Api(ClusterConfig.from_data("test", {"kubeconfig": str(path), "volume": volume}))


def write(folder: Path, name: str, data: str) -> str:
    (folder / name).write_bytes(base64.b64decode(data))
    return name


def script(folder: Path, token: str) -> str:
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token},
    }  # fmt: skip
    path = folder / "login"
    path.write_text(f"#!{sys.executable}\nprint({json.dumps(credential)!r})\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("form", ["inline", "files", "token", "token file", "exec", "unchecked"])
def test_each_form_is_let_in(form: str, server: ApiServer, tmp_path: Path) -> None:
    cluster: dict[str, Any] = {"server": server.url, "certificate-authority-data": certificates().authority}
    user: dict[str, Any] = dict(certificates().admin)
    token = server.access.admin_token
    match form:
        case "files":
            # Relative to the kubeconfig, as minikube writes them.
            cluster = {
                "server": server.url,
                "certificate-authority": write(tmp_path, "ca.crt", certificates().authority),
            }
            user = {name.removesuffix("-data"): write(tmp_path, name, data) for name, data in user.items()}
        case "token":
            user = {"token": token}
        case "token file":
            (tmp_path / "token").write_text(token)
            user = {"tokenFile": str(tmp_path / "token")}
        case "exec":
            user = {
                "exec": {
                    "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
                    "command": script(tmp_path, token),
                }
            }  # fmt: skip
        case "unchecked":
            cluster = {"server": server.url, "insecure-skip-tls-verify": True}
    path = write_kubeconfig(tmp_path / "kubeconfig", cluster, user)
    assert api(path).list(path_of("v1", "namespaces"))["items"] == []


def test_a_server_that_another_authority_vouches_for_is_not_spoken_to(server: ApiServer, tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "kubeconfig", {"server": server.url}, certificates().admin)
    with pytest.raises(BackendUnavailable, match="certificate"):
        api(path).get("/version")
