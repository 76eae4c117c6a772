"""Requirements files through the API of a console of real processes, whose package index has only `alpha`."""

from tests.flows import WHOLE_CONSOLE

pytestmark = WHOLE_CONSOLE


def start(buyer, requirements):
    """Buy a run of a script that imports `alpha`. Return the job's id."""
    files = {"packages.txt": requirements, "imports.py": "import alpha; print('alpha', alpha.VERSION)\n"}
    for name, text in files.items():
        buyer.call("PUT", f"workspaces/main/files/{name}", content=text.encode())
    return buyer.start("packages", code_path="imports.py", nodes=1, requirements="packages.txt")


def layers(console):
    """Return the id, the state and the time of the last use of each layer."""
    return console.query("SELECT id, state, used_at FROM jobs_packagelayer ORDER BY id")


def test_a_run_gets_its_packages_and_the_next_one_needs_no_installation(console, buyer):
    first = start(buyer, "alpha==1.0\n")
    assert buyer.ended(first)["state"] == "succeeded", buyer.call("GET", f"jobs/{first}/packages/")
    assert "alpha 1.0" in buyer.log(first)
    packages = buyer.call("GET", f"jobs/{first}/packages/")
    assert (packages["state"], packages["requirements"]) == ("ready", ["alpha==1.0"])
    assert "+ alpha==1.0" in packages["log"]
    installed = layers(console)

    second = start(buyer, "# again\nalpha == 1.0\n")
    assert buyer.ended(second)["state"] == "succeeded"
    assert "alpha 1.0" in buyer.log(second)
    # The same layer, used later
    assert [layer[:2] for layer in layers(console)] == [layer[:2] for layer in installed]
    assert len(list(console.var.glob("packages/*/*/request.json"))) == 1  # one installation
