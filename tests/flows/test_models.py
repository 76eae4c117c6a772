"""A model's whole way over the API: trained, published, downloaded, loaded elsewhere, and used by a second run."""

import io
import subprocess
import tarfile

import pytest

from tests.flows import WHOLE_CONSOLE
from tests.runtime.images_of_ours import image_folder

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow, pytest.mark.torch]
TRAIN = """
import os, sys, torch

model = torch.nn.Linear(1, 1)
if len(sys.argv) > 1:  # the model of an earlier run
    model.load_state_dict(torch.load(os.path.join(os.environ["MODELS_PATH"], sys.argv[1], "net.pt"), weights_only=True))
checkpoint = os.path.join(os.environ["CHECKPOINT_DIR"], "last.pt")
begin = torch.load(checkpoint, weights_only=True)["epoch"] if os.path.exists(checkpoint) else 0
inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(begin + 1, begin + 31):
    loss = torch.nn.functional.mse_loss(model(inputs), 3 * inputs + 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
torch.save(model.state_dict(), os.path.join(os.environ["OUTPUT_DIR"], "net.pt"))
torch.save({"epoch": epoch}, checkpoint)
print("models", os.environ["MODELS"], "began after epoch", begin, "first weight", round(model.weight.item(), 2))
"""
LOAD = """
import torch
model = torch.nn.Linear(1, 1)
model.load_state_dict(torch.load("net.pt", weights_only=True))
print(round(model(torch.tensor([[2.0]])).item()))
"""


def test_train_publish_download_load_and_train_again(buyer, tmp_path):
    buyer.call("PUT", "workspaces/main/files/fit.py", content=TRAIN.encode())
    run = {"image": "pytorch", "code_path": "fit.py", "arguments": [], "nodes": 1}
    first = buyer.start(**run)
    assert buyer.ended(first)["state"] == "succeeded", buyer.log(first)

    version = buyer.call("POST", "models/", json={"name": "net", "job": first, "path": "outputs"})
    assert (version["name"], version["version"], version["file_count"]) == ("net", 1, 1)
    made = buyer.call("GET", "models/net/")["versions"][0]["lineage"]
    assert (made["job"], made["code_path"], made["price_minor"]) == (first, "fit.py", buyer.bill(first)["total_minor"])
    assert made["metrics"]["loss"]["last"] < 0.01 < made["metrics"]["loss"]["highest"]

    archive = buyer.http.get("models/net/archive/", params={"version": 1})
    with tarfile.open(fileobj=io.BytesIO(archive.content), mode="r:gz") as packed:
        packed.extractall(tmp_path, filter="data")
    python = image_folder("pytorch") / "bin" / "python"
    loaded = subprocess.run([python, "-c", LOAD], cwd=tmp_path / "net-v1", capture_output=True, text=True, check=False)
    assert (loaded.returncode, loaded.stdout) == (0, "7\n"), loaded.stderr  # 3 * 2 + 1, as it was trained

    second = buyer.start(**run | {"arguments": ["net"], "models": ["net"], "from_checkpoint": first})
    ended = buyer.ended(second)
    assert ended["state"] == "succeeded", buyer.log(second)
    assert (ended["models"], ended["from_checkpoint"]) == (["net@1"], first)
    log = buyer.log(second)
    assert "models net began after epoch 30" in log
    assert "epoch 60 loss 0.000" in log
