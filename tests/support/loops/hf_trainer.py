"""Trains by a Hugging Face Trainer; ``callback`` adds the callback of ours."""

from __future__ import annotations

import sys

import torch
from meters import digest
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, labels)
        print(repr(loss.item()), flush=True)
        self.calls += 1
        if self.calls == 5 and "error" in sys.argv:
            raise RuntimeError("loss is not finite")
        return {"loss": loss, "logits": logits}


def main() -> None:
    torch.manual_seed(13)
    torch.set_num_threads(1)
    callbacks: list[TrainerCallback] = []
    if "callback" in sys.argv:
        from harness.hooks.transformers import WellfedCallback

        callbacks.append(WellfedCallback("report"))
    model = Classifier()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="trained",
            num_train_epochs=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            dataloader_num_workers=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            seed=13,
        ),
        train_dataset=Points(96, 1),
        eval_dataset=Points(24, 2),
        callbacks=callbacks,
    )
    trainer.train()
    print(digest(model))


if __name__ == "__main__":
    main()
