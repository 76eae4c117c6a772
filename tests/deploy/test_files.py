"""Dockerfiles, Compose and env files name only files, stages, commands and settings that exist."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from django.core.management import get_commands

from console import deployment
from console.supervision import supervisor
from runtime.images import recipes
from tests.deploy.conftest import DEPLOY, KUBERNETES, OVERLAYS, ROOT, containers, env_file, objects, pods

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
EXAMPLES = list(DEPLOY.rglob("*.env*"))
INSTRUCTIONS = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD", "LABEL"}
NOT_OURS = {
    "POSTGRES_PASSWORD", "REDIS_PASSWORD", "POSTGRES_USER", "POSTGRES_DB", "PGDATA", "PATH", "HOME",
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "DJANGO_SETTINGS_MODULE", "PIP_NO_CACHE_DIR",
    "PIP_DISABLE_PIP_VERSION_CHECK",
}  # fmt: skip
"""Variables that are set in deploy/ and not read by the console's settings."""


def instructions(path):
    """Return the (word, rest) of each instruction of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [tuple(line.strip().split(None, 1)) for line in text.splitlines() if line.strip()]


def arguments_of(path, word):
    """Return what follows each instruction `word` of a Dockerfile."""
    return [rest for name, rest in instructions(path) if name == word]


def created_secrets():
    done = subprocess.run(["sh", DEPLOY / "make-secrets"], capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_every_variable_that_is_set_is_read():
    read = set(re.findall(r'env\.\w+\(\s*"([A-Z_]+)"', (ROOT / "console" / "settings.py").read_text()))
    assert len(read) > 30  # else the expression above finds nothing
    names = {str(path): set(env_file(path)) for path in EXAMPLES}
    for path in DOCKERFILES:
        names[path.name] = {word.split("=", 1)[0] for rest in arguments_of(path, "ENV") for word in shlex.split(rest)}
    names["make-secrets"] = set(created_secrets())
    names["compose"] = {name for service in SERVICES.values() for name in service.get("environment", {})}
    for overlay in OVERLAYS:
        every = [each for _name, _metadata, spec in pods(objects(overlay)) for each in containers(spec)]
        names[overlay] = {variable["name"] for container in every for variable in container.get("env", ())}
        names[overlay] |= {key for each in objects(overlay) if each["kind"] == "ConfigMap" for key in each["data"]}
    assert {where: unknown for where, variables in names.items() if (unknown := variables - read - NOT_OURS)} == {}


def test_created_secrets_are_random_and_long_and_fit_the_servers_in_compose_and_the_trial():
    one, other = created_secrets(), created_secrets()
    assert all(one[name] != other[name] for name in one)
    assert len(one["SECRET_KEY"]) >= deployment.MIN_KEY_LENGTH
    assert one["POSTGRES_PASSWORD"] in one["DATABASE_URL"]
    assert one["REDIS_PASSWORD"] in one["REDIS_URL"]
    hosts = {re.search(r"@([\w-]+):", one[name])[1] for name in ("DATABASE_URL", "REDIS_URL")}
    networks = [service["networks"]["default"] for service in SERVICES.values() if "networks" in service]
    assert hosts <= {alias for network in networks for alias in network["aliases"]}
    assert hosts <= {each["metadata"]["name"] for each in objects("trial") if each["kind"] == "Service"}


def test_the_examples_hold_no_secret_and_mark_what_to_fill_in():
    assert not list(DEPLOY.rglob("secrets.env"))
    for path in EXAMPLES:
        for name, value in env_file(path).items():
            if re.search(r"SECRET|PASSWORD|TOKEN|(DATABASE|REDIS|EMAIL)_URL", name):
                assert "CHANGE-ME" in value, f"{path}: {name}"
    for path in (DEPLOY / "compose/settings.env.example", KUBERNETES / "overlays/production/secrets.env.example"):
        assert sum("CHANGE-ME" in value for value in env_file(path).values()) >= 4  # else the loop above finds nothing


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_copies_what_exists_and_runs_as_a_user(path):
    context = path.with_name(f"{path.name}.dockerignore").read_text().split()
    assert context[0] == "**"  # only what a line with "!" names is sent to the builder
    sent = [line[1:] for line in context if line.startswith("!")]
    stages, users = set(), []
    for name, rest in instructions(path):
        words = [word for word in shlex.split(rest) if not word.startswith("--")]
        assert name in INSTRUCTIONS
        if name == "FROM":
            assert words[0] in {*stages, "${PYTHON}"}
            stages |= set(words[2:3])
            users = []
        elif name == "USER":
            users.append(rest)
        elif origin := re.search(r"--from=(\S+)", rest):
            assert origin[1] in stages
        elif name == "COPY":
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == each or source.startswith(f"{each}/") for each in sent), source
    assert users == ["10001:10001"]  # of the last stage
    assert "PYTHON" in {rest.partition("=")[0] for rest in arguments_of(path, "ARG")}


def test_the_consoles_image_has_every_package_and_starts_a_command():
    path = DEPLOY / "docker" / "console.Dockerfile"
    copied = {shlex.split(rest)[0] for rest in arguments_of(path, "COPY")}
    packages = {"console", "billing", "storage", "jobs", "runtime", "templates", "static", "locale", "manage.py"}
    assert packages | {"deploy/images"} <= copied
    assert json.loads(arguments_of(path, "ENTRYPOINT")[0]) == ["python", "/srv/console/manage.py"]
    assert json.loads(arguments_of(path, "CMD")[0]) == ["serve", "web"]
    assert "serve" in get_commands()


def test_there_is_a_build_target_for_each_recipe():
    bake = json.loads((DEPLOY / "docker" / "docker-bake.json").read_text())
    targets = {name: target for name, target in bake["target"].items() if name != "console"}
    assert set(targets) == set(recipes.recipe_names())
    assert set(bake["group"]["default"]["targets"]) == set(bake["target"])
    for name, target in targets.items():
        assert target["args"] == {"IMAGE": name}
        assert (ROOT / target["dockerfile"]).exists()


def test_the_dockerfiles_script_installs_a_recipe_with_the_standard_library_alone(tmp_path):
    recipes_folder = tmp_path / "deploy" / "images"
    recipes_folder.mkdir(parents=True)
    (recipes_folder / "tiny.txt").write_text("# check: import json\n")
    (tmp_path / "runtime").symlink_to(ROOT / "runtime")
    script = (DEPLOY / "docker" / "install_image.py").read_text()
    # The script names no folder of recipes, so it would find the real ones, beside the link's target. Name ours.
    recipes_argument = f"recipes=Path({str(recipes_folder)!r})"
    script = script.replace("progress=PrintedProgress()", f"progress=PrintedProgress(), {recipes_argument}")
    (tmp_path / "install_image.py").write_text(script)
    install = lambda name: subprocess.run(
        # -S: without the packages of the console, which the builder's stage lacks.
        [sys.executable, "-S", "install_image.py", name, str(tmp_path / "image"), "cpu"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    done = install("tiny")
    assert done.returncode == 0, done.stderr
    assert "Checking: import json" in done.stdout
    assert (tmp_path / "image" / "bin" / "python3").exists()
    assert "There is no built-in image 'none'" in install("none").stderr


def test_compose_runs_every_program_after_prepare():
    served = {name: each["command"][1] for name, each in SERVICES.items() if each.get("command", [])[:1] == ["serve"]}
    not_served = {"services", "sandbox", "tools"}  # Compose has its own PostgreSQL and Redis, and leaves out the others
    assert set(served.values()) == {program.name for program in supervisor.programs()} - not_served
    assert SERVICES["prepare"]["command"] == ["prepare"]
    for name in served:
        assert SERVICES[name]["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}
        settings = [SERVICES[name][key] for key in ("read_only", "user", "cap_drop")]
        assert settings == [True, "10001:10001", ["ALL"]]
        assert {"data:/srv/trainyard", "var:/var/lib/trainyard"} <= set(SERVICES[name]["volumes"])
    volumes = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert {name for name in volumes if re.fullmatch(r"\w+", name)} == set(COMPOSE["volumes"])
    for service in SERVICES.values():
        for file in service.get("env_file", ()):
            assert file == "secrets.env" or (DEPLOY / "compose" / f"{file}.example").exists()
        assert set(service.get("depends_on", ())) <= set(SERVICES)
