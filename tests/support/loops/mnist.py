"""Trains on small gray images, in the structure of the well-known MNIST script."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from meters import digest
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 2)
        self.conv2 = nn.Conv2d(4, 8, 3, 2)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(torch.flatten(x, 1))
        return F.log_softmax(self.fc1(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch) -> None:  # type: ignore
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}]\tLoss: {loss.item()!r}")
            if args.dry_run:
                break


def test(model, device, test_loader) -> None:  # type: ignore
    model.eval()
    test_loss = 0.0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    print(f"\nTest set: loss: {test_loss!r}, {correct}/{len(test_loader.dataset)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="trains on digits")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1,), (0.3,))])
    dataset1 = datasets.FakeData(160, (1, 28, 28), 10, transform)
    dataset2 = datasets.FakeData(32, (1, 28, 28), 10, transform, random_offset=7)
    train_loader = DataLoader(dataset1, batch_size=args.batch_size, shuffle=True, num_workers=1)
    test_loader = DataLoader(dataset2, batch_size=32)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "mnist_cnn.pt")
    print(digest(model))


if __name__ == "__main__":
    main()
