"""Trains by timm's own parts: a model, an optimizer, a schedule, a loader and its meters."""

from __future__ import annotations

import sys

import timm
import torch
from meters import digest
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, accuracy


def loader_of(folder: str, training: bool) -> torch.utils.data.DataLoader:
    name = "train" if training else "val"
    return create_loader(
        create_dataset("", root=folder, split=name),
        input_size=(3, 48, 48),
        batch_size=8,
        is_training=training,
        use_prefetcher=False,
        no_aug=False,
        num_workers=2,
        persistent_workers=True,
        device=torch.device("cpu"),
    )


def validate(model: torch.nn.Module, loader: torch.utils.data.DataLoader) -> float:
    top1 = AverageMeter()
    model.eval()
    with torch.inference_mode():
        for images, target in loader:
            top1.update(accuracy(model(images), target)[0].item(), len(target))
    return top1.avg


def main() -> None:
    torch.manual_seed(11)
    torch.set_num_threads(1)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=4)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=2, warmup_epochs=1)
    training, validation = loader_of(sys.argv[1], True), loader_of(sys.argv[1], False)
    loss_of = torch.nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        losses = AverageMeter()
        for images, target in training:
            loss = loss_of(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), len(target))
            print(repr(losses.val))
        scheduler.step(epoch + 1)
        print(epoch, repr(losses.avg), repr(validate(model, validation)))
    print(digest(model))


if __name__ == "__main__":
    main()
