"""Trains on a tree of JPEGs, in the structure of the well-known ImageNet script."""

from __future__ import annotations

import argparse
import os
import random

import torch
import torch.distributed as dist
from meters import Mean, digest
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trains a classifier")
    parser.add_argument("data", help="folder with train/ and val/")
    parser.add_argument("-a", "--arch", default="squeezenet1_1")
    parser.add_argument("-j", "--workers", default=2, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--lr", default=0.01, type=float)
    parser.add_argument("-p", "--print-freq", default=2, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("-e", "--evaluate", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    main_worker(args)


def main_worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.distributed:
        dist.init_process_group("gloo")
    model: nn.Module = models.__dict__[args.arch](num_classes=4)
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    train_dataset, val_dataset = open_datasets(args.data)
    sampler = DistributedSampler(train_dataset) if args.distributed else None
    train_loader = DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=sampler is None,
        num_workers=args.workers,
        sampler=sampler,
    )
    val_loader = DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers
    )
    if args.evaluate:
        validate(val_loader, model, criterion)
        return
    best = 0.0
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        top1 = validate(val_loader, model, criterion)
        scheduler.step()
        if not args.distributed or dist.get_rank() == 0:
            is_best, best = top1 > best, max(top1, best)
            save_checkpoint(
                {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer}, is_best
            )
    print(digest(model))
    if args.distributed:
        dist.destroy_process_group()


def open_datasets(data: str) -> tuple[datasets.ImageFolder, datasets.ImageFolder]:
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train_dataset = datasets.ImageFolder(
        os.path.join(data, "train"),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(48),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                normalize,
            ]
        ),
    )
    val_dataset = datasets.ImageFolder(
        os.path.join(data, "val"),
        transforms.Compose(
            [transforms.Resize(56), transforms.CenterCrop(48), transforms.ToTensor(), normalize]
        ),
    )
    return train_dataset, val_dataset


def train(loader, model, criterion, optimizer, epoch, args) -> None:  # type: ignore
    losses, top1 = Mean(), Mean()
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.add(loss.item(), images.size(0))
        top1.add(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == args.print_freq - 1:
            print(f"Epoch: [{epoch}][{i + 1}/{len(loader)}] Loss {losses} Acc@1 {top1}")


def validate(loader, model, criterion) -> float:  # type: ignore
    losses, top1 = Mean(), Mean()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.add(criterion(output, target).item(), images.size(0))
            top1.add(accuracy(output, target), images.size(0))
    print(f"* Loss {losses} Acc@1 {top1}")
    return top1.total / top1.count


def save_checkpoint(state: dict, is_best: bool, filename: str = "checkpoint.pth.tar") -> None:
    torch.save(state, filename)
    if is_best:
        torch.save(state["model"], "model_best.pth.tar")


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    with torch.no_grad():
        return 100.0 * (output.argmax(1) == target).float().mean().item()


if __name__ == "__main__":
    main()
