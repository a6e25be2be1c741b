"""Accelerate, as its nlp_example and complete_nlp_example: a small BERT that classifies."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

EVAL_BATCH_SIZE = 16


class Sentences(torch.utils.data.Dataset):
    def __init__(self, number, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (number,), generator=g).tolist()
        self.ids = [torch.randint(3, 60, (n,), generator=g) for n in lengths]
        self.labels = [int(ids.float().mean() > 31) for ids in self.ids]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def collate_fn(examples):
    ids = torch.nn.utils.rnn.pad_sequence([e["input_ids"] for e in examples], batch_first=True)
    labels = torch.tensor([e["labels"] for e in examples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def get_dataloaders(batch_size):
    train_dataloader = DataLoader(
        Sentences(100, 0),
        shuffle=True,
        collate_fn=collate_fn,
        batch_size=batch_size,
        drop_last=True,
    )
    eval_dataloader = DataLoader(
        Sentences(41, 1), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader


def training_function(config, args):
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, project_dir=args.output_dir
    )
    set_seed(config["seed"], device_specific=True)
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    )
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=4,
        num_training_steps=(len(train_dataloader) * config["num_epochs"])
        // args.gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device) if hasattr(batch, "to") else None
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output.loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = total = 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += int((predictions == references).sum())
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.4f} of {total}")
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--output_dir", default="out")
    args = parser.parse_args()
    config = {"lr": 2e-3, "num_epochs": 4, "seed": 42, "batch_size": 8}
    training_function(config, args)


if __name__ == "__main__":
    main()
