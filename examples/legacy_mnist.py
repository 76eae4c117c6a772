"""An MNIST script in the style of 2019 for `torch.distributed.launch`. It shows that such scripts run unchanged."""

# ruff: noqa: D101,D102,D103,N812,PLR0402,PLW2901,PTH118,UP008,UP010,UP032 - kept in the style of 2019
from __future__ import print_function

import argparse
import os

import torch
import torch.distributed
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST, distributed")
    parser.add_argument("--local_rank", type=int, required=True)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()

    torch.distributed.init_process_group(backend=os.environ["BACKEND"], init_method="env://")
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank)
    else:
        device = torch.device("cpu")

    root = os.path.join(os.environ["DATASETS_PATH"], os.environ["DATASETS"].split(",")[0])
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_set = datasets.MNIST(root=root, train=True, download=False, transform=transform)
    test_set = datasets.MNIST(root=root, train=False, download=False, transform=transform)
    sampler = torch.utils.data.distributed.DistributedSampler(train_set)
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=int(os.environ["BATCH_SIZE"]), sampler=sampler)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=1000)

    model = nn.parallel.DistributedDataParallel(Net().to(device))
    optimizer = optim.SGD(model.parameters(), lr=float(os.environ["LR"]), momentum=0.5)

    epochs = int(os.environ["EPOCHS"])
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if rank == 0 and batch_idx % args.log_interval == 0:
                print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, batch_idx, len(train_loader), loss.item()))

    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            correct += output.argmax(dim=1).eq(target.to(device)).sum().item()
    if rank == 0:
        print("Test Accuracy: {:.4f}".format(correct / len(test_set)))


if __name__ == "__main__":
    main()
