"""A plain training script, for ``exits``: torchvision's data set and transforms, torch's loader.

python -m scripts.bench.plain ROOT OUT SIDE BATCH EPOCHS NETWORK
"""

from __future__ import annotations

import itertools
import sys

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def block(inside: int, outside: int, *rest: nn.Module) -> list[nn.Module]:
    """Returns a convolution, ``rest``, a batch norm and a ReLU."""
    convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    return [convolution, *rest, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*block(width, width), *block(width, width)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Returns float ``[N, C, H, W]``, as ``x``."""
        return nn.functional.relu(x + self.inner(x))


def network(name: str, classes: int) -> nn.Module:
    """Returns wellfed's network ``small``, or one of torchvision."""
    if name != "small":
        found: nn.Module = torchvision.models.get_model(name, num_classes=classes)
        return found
    stages: list[nn.Module] = [nn.Conv2d(3, 16, 5, stride=2, padding=2, bias=False)]
    stages += [nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    for inside, outside in itertools.pairwise((16, 32, 64, 128)):
        stages += block(inside, outside, nn.MaxPool2d(2))
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)
    return nn.Sequential(*stages, Residual(128), *head)


def load(path: str) -> Tensor:
    """Returns an image, uint8 ``[3, H, W]``."""
    pixels: Tensor = decode_image(path, ImageReadMode.RGB)
    return pixels


def main(root: str, out: str, side: int, batch: int, epochs: int, *, name: str) -> None:
    """Trains, evaluates and saves a checkpoint after each epoch."""
    norm = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    crop = v2.RandomResizedCrop(side, antialias=True), v2.RandomHorizontalFlip()
    center = v2.Resize(round(side * 256 / 224), antialias=True), v2.CenterCrop(side)
    train_set = ImageFolder(f"{root}/train", v2.Compose([*crop, *norm]), loader=load)
    val_set = ImageFolder(f"{root}/val", v2.Compose([*center, *norm]), loader=load)
    torch.manual_seed(0)
    train = DataLoader(
        train_set, batch, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True
    )
    val = DataLoader(val_set, batch, num_workers=2, persistent_workers=True)
    model: nn.Module = network(name, len(train_set.classes)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    with SummaryWriter(out) as writer:
        step = 0
        for epoch in range(epochs):
            model.train()
            for images, labels in train:
                logits = model(images.to(memory_format=torch.channels_last))
                loss = nn.functional.cross_entropy(logits, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                if step % 10 == 0:
                    writer.add_scalar("loss", loss.item(), step)
            model.eval()
            right = 0
            with torch.no_grad():
                for images, labels in val:
                    logits = model(images.to(memory_format=torch.channels_last))
                    right += int((logits.argmax(1) == labels).sum())
            writer.add_scalar("top1", right / len(val_set), step)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "epoch": epoch}, f"{out}/last.pt")
            print(epoch, right / len(val_set), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), name=sys.argv[6])
