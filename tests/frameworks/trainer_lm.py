"""Transformers' Trainer: a small GPT-2 on a list, with compute_metrics."""

import sys

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def make(number, seed):
    g = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(number):
        start = int(torch.randint(40, (1,), generator=g))
        length = int(torch.randint(6, 12, (1,), generator=g))
        examples.append({"input_ids": [(start + 3 * i) % 50 for i in range(length)]})
    return examples


def collate(examples):
    longest = max(len(e["input_ids"]) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        n = len(example["input_ids"])
        ids[row, :n] = torch.tensor(example["input_ids"])
        labels[row, :n] = ids[row, :n]
        mask[row, :n] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)[:, :-1]
    labels = labels[:, 1:]
    keep = labels != -100
    return {"accuracy": float((predictions == labels)[keep].mean())}


if __name__ == "__main__":
    output_dir = sys.argv[1] if len(sys.argv) > 1 else "out"
    set_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    training_args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        num_train_epochs=3,
        learning_rate=2e-3,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=collate,
        train_dataset=make(64, 0),
        eval_dataset=make(21, 1),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model()
