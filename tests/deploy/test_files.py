"""Dockerfiles, Compose and env files name only what is there: files, stages, commands, settings."""

import ast
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from django.conf import settings
from django.core.management import get_commands

from console import deployment, supervision
from runtime.backends import recipes
from tests.deploy.conftest import DEPLOY, KUBERNETES, OVERLAYS, ROOT, containers, env_file, objects, pods

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
OTHERS = {
    "POSTGRES_PASSWORD", "REDIS_PASSWORD",  # of the servers beside the console
    "POSTGRES_USER", "POSTGRES_DB", "PGDATA",
    "PATH", "HOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "DJANGO_SETTINGS_MODULE",
    "PIP_NO_CACHE_DIR", "PIP_DISABLE_PIP_VERSION_CHECK",
}  # fmt: skip
"""What is set in deploy/ and read by somebody else than the console's settings."""


def settings_read():
    """Every variable that console/settings.py reads."""
    tree = ast.parse((ROOT / "console" / "settings.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if (
                isinstance(owner, ast.Name)
                and owner.id == "env"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(node.args[0].value)
    return found


def instructions(path):
    """(word, rest) of a Dockerfile, its continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [tuple(line.strip().split(None, 1)) for line in text.splitlines() if line.strip()]


def docker_env(path):
    return {
        word.split("=", 1)[0]
        for name, rest in instructions(path)
        if name == "ENV"
        for word in shlex.split(rest)
    }  # fmt: skip


def examples():
    return [path for path in DEPLOY.rglob("*.env*") if path.name not in {"secrets.env"}]


def told_by():
    """Where a variable is set -> its names."""
    found = {str(path.relative_to(ROOT)): set(env_file(path)) for path in examples()}
    found |= {path.name: docker_env(path) for path in DOCKERFILES}
    found["make-secrets"] = set(made_secrets())
    found["compose"] = {name for one in COMPOSE["services"].values() for name in one.get("environment", {})}
    for overlay in OVERLAYS:
        found[overlay] = {
            one["name"]
            for _name, _metadata, spec in pods(objects(overlay))
            for container in containers(spec)
            for one in container.get("env", ())
        } | {key for one in objects(overlay) if one["kind"] == "ConfigMap" for key in one["data"]}
    return found


def made_secrets():
    made = subprocess.run(["sh", DEPLOY / "make-secrets"], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in made.splitlines())


def test_every_variable_that_is_set_is_read():
    read = settings_read()
    assert len(read) > 30
    unknown = {where: names - read - OTHERS for where, names in told_by().items()}
    assert {where: names for where, names in unknown.items() if names} == {}


def test_secrets_are_random_and_long_enough():
    one, other = made_secrets(), made_secrets()
    assert all(one[name] != other[name] for name in one)
    assert len(one["SECRET_KEY"]) >= deployment.LEAST_KEY_LENGTH
    assert one["POSTGRES_PASSWORD"] in one["DATABASE_URL"]
    assert one["REDIS_PASSWORD"] in one["REDIS_URL"]
    hosts = {re.search(r"@([\w-]+):", one[name])[1] for name in ("DATABASE_URL", "REDIS_URL")}
    services = {made["metadata"]["name"] for made in objects("trial") if made["kind"] == "Service"}
    aliases = {
        alias for service in COMPOSE["services"].values() if "networks" in service
        for alias in service["networks"]["default"]["aliases"]
    }  # fmt: skip
    assert hosts <= services
    assert hosts <= aliases


def test_no_secret_is_in_the_repository():
    assert not list(DEPLOY.rglob("secrets.env"))
    for path in examples():
        for name, value in env_file(path).items():
            if re.search(r"SECRET|PASSWORD|TOKEN|(DATABASE|REDIS|EMAIL)_URL", name):
                assert "CHANGE-ME" in value, f"{path}: {name}"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_builds_from_what_is_there(path):
    stages, arguments = set(), set()
    for name, rest in instructions(path):
        words = [word for word in shlex.split(rest) if not word.startswith("--")]
        assert name in {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD", "LABEL"}
        if name == "ARG":
            arguments.add(rest.partition("=")[0])
        elif name == "FROM":
            assert words[0] in stages or words[0] == "${PYTHON}"
            if len(words) == 3:
                stages.add(words[2])
        elif name == "COPY":
            origin = re.search(r"--from=(\S+)", rest)
            if origin:
                assert origin[1] in stages
            else:
                for source in words[:-1]:
                    assert (ROOT / source).exists(), source
                    assert is_sent(path, source), f"{source} is not in the build's context"
    assert {"PYTHON"} <= arguments


def is_sent(path, source):
    """Whether the Dockerfile's ignore file, which refuses all by default, lets this through."""
    lines = path.with_name(f"{path.name}.dockerignore").read_text().split()
    assert lines[0] == "**"
    return any(source == line[1:] or source.startswith(f"{line[1:]}/") for line in lines if line.startswith("!"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_not_root_and_says_so_as_a_number(path):
    last = [rest for name, rest in instructions(path) if name == "USER"][-1]
    stage = [index for index, (name, _rest) in enumerate(instructions(path)) if name == "FROM"][-1]
    assert last == "10001:10001"
    assert [name for name, _rest in instructions(path)[stage:]].count("USER") == 1


def test_the_consoles_image_has_every_package_and_starts_what_is_there():
    (path,) = [path for path in DOCKERFILES if path.stem == "console"]
    told = instructions(path)
    copied = {shlex.split(rest)[0] for name, rest in told if name == "COPY"}
    packages = {"console", "billing", "storage", "jobs", "runtime", "templates", "static", "locale", "manage.py"}
    assert packages | {"deploy/images"} <= copied
    entry = json.loads(next(rest for name, rest in told if name == "ENTRYPOINT"))
    assert entry == ["python", "/srv/console/manage.py"]
    command = json.loads(next(rest for name, rest in told if name == "CMD"))
    assert command == ["serve", "web"]
    assert command[0] in get_commands()


def test_training_images_are_the_recipes():
    baked = json.loads((DEPLOY / "docker" / "docker-bake.json").read_text())
    made = {name: target for name, target in baked["target"].items() if name != "console"}
    assert set(made) == set(recipes.names())
    assert set(baked["group"]["default"]["targets"]) == set(baked["target"])
    for name, target in made.items():
        assert target["args"] == {"IMAGE": name}
        assert (ROOT / target["dockerfile"]).exists()


def test_the_recipes_installer_needs_nothing_but_python():
    """Its stage installs nothing for it."""
    script = """
import sys
import runtime.backends.builder
places = [module.__spec__.origin or "" for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
found = {place.split("site-packages/")[1].split("/")[0] for place in places if "site-packages/" in place}
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if not name.startswith(("_", "distutils"))} == set()


def test_a_recipe_is_installed_by_the_script(tmp_path):
    """With the very command of the Dockerfile, and a recipe that needs no download."""
    (tmp_path / "deploy" / "images").mkdir(parents=True)
    (tmp_path / "deploy" / "images" / "tiny.txt").write_text("# check: import json\n")
    (tmp_path / "runtime").symlink_to(ROOT / "runtime")
    script = (DEPLOY / "docker" / "install_image.py").read_text()
    patched = script.replace("progress=Lines()", f"progress=Lines(), recipes=Path({str(tmp_path / 'deploy/images')!r})")
    (tmp_path / "install_image.py").write_text(patched)
    call = [sys.executable, "install_image.py"]
    done = subprocess.run(
        [*call, "tiny", str(tmp_path / "image")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Checking: import json" in done.stdout
    assert (tmp_path / "image" / "bin" / "python3").exists()
    missing = subprocess.run(
        [*call, "none", str(tmp_path / "other")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert missing.returncode != 0
    assert "There is no built-in image 'none'" in missing.stderr


def test_compose_runs_every_program_behind_prepare():
    services = COMPOSE["services"]
    told = {
        name: service["command"] for name, service in services.items() if service.get("command", [])[:1] == ["serve"]
    }
    programs = {program.name for program in supervision.programs()} - {"services", "sandbox"}
    assert {command[1] for command in told.values()} == programs
    assert services["prepare"]["command"] == ["prepare"]
    for name in told:
        assert services[name]["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}
        assert services[name]["read_only"] is True
        assert services[name]["user"] == "10001:10001"
        assert services[name]["cap_drop"] == ["ALL"]
        assert {"data:/srv/trainyard", "var:/var/lib/trainyard"} <= set(services[name]["volumes"])
    named = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert {name for name in named if re.fullmatch(r"\w+", name)} == set(COMPOSE["volumes"])
    for service in services.values():
        for file in service.get("env_file", ()):
            path = DEPLOY / "compose" / f"{file}.example"
            assert path.exists() or file == "secrets.env"
        assert set(service.get("depends_on", ())) <= set(services)


def test_the_socket_that_streams_are_handed_over_by_is_shared():
    assert settings.TRAINYARD_LIVE_SOCKET.is_relative_to(settings.VAR_DIR)
    for overlay in OVERLAYS:
        (web,) = [
            spec for name, _metadata, spec in pods(objects(overlay)) if name == "Deployment/trainyard-web"
        ]  # fmt: skip
        mounted = {
            container["name"]: mount["mountPath"]
            for container in web["containers"]
            for mount in container["volumeMounts"]
            if mount["name"] == "var"
        }
        assert mounted["web"] == mounted["live"] == "/var/lib/trainyard"


@pytest.mark.parametrize(
    "path",
    [DEPLOY / "compose" / "settings.env.example", KUBERNETES / "overlays/production/secrets.env.example"],
    ids=str,
)
def test_an_example_says_every_value_that_is_a_persons_to_fill_in(path):
    assert sum("CHANGE-ME" in value for value in env_file(path).values()) >= 4
