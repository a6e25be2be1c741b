"""ddp_check on scripts with Accelerate, Transformers' Trainer, Lightning and Fabric: right ones,
and faults of their users. By the real command, as the script imports its framework; each takes a
minute, and needs pip install accelerate transformers lightning tensorboard wandb."""

import json
import os
import subprocess
import sys

import pytest
from same_text import ROOT

SCRIPTS = {  # {script: (what it needs, its flags to write into a new folder)}
    "accelerate_cv": ("accelerate", ["--output_dir", "out"]),
    "accelerate_nlp": ("transformers", ["--output_dir", "out"]),
    "trainer_lm": ("transformers", ["out"]),
    "lightning_trainer": ("lightning", ["--output", "out"]),
    "fabric": ("lightning", ["--output", "out.pt"]),
    "tensorboard_ddp": ("tensorboard", ["out"]),
    "wandb_ddp": ("wandb", []),
}
CONFIGURED = """from accelerate.utils import DataLoaderConfiguration
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(WITH))"""
OF_ALL = "batch_size=self.batch_size // self.trainer.world_size, shuffle=True"
RIGHT = [  # script, name, changes, further flags
    *[(script, "as it is", {}, []) for script in SCRIPTS],
    (
        "accelerate_cv",
        "split_batches",
        {"accelerator = Accelerator()": CONFIGURED.replace("WITH", "split_batches=True")},
        [],
    ),
    (
        "accelerate_cv",
        "a seedable sampler",
        {"accelerator = Accelerator()": CONFIGURED.replace("WITH", "use_seedable_sampler=True")},
        [],
    ),
    (
        "accelerate_nlp",
        "gradients of two batches",
        {},
        ["--gradient_accumulation_steps", "2"],
    ),
    (
        "trainer_lm",
        "gradients of two batches, clipped",
        {"num_train_epochs=3": "num_train_epochs=3, gradient_accumulation_steps=2"},
        [],
    ),
    (
        "lightning_trainer",
        "a batch size of all ranks, which the script divides",
        {"batch_size=self.batch_size, shuffle=True": OF_ALL},
        [],
    ),
]
OWN_LOSS = """\
    class Trainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(inputs["input_ids"], inputs["attention_mask"])
            logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
            cross_entropy = torch.nn.functional.cross_entropy
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
            return (loss, outputs) if return_outputs else loss

"""
FAULTS = [  # script, name, changes, steps, what is found, text of the line that is named
    (
        "accelerate_cv",
        "metrics without gather",
        {"accelerator.gather_for_metrics((predictions, ": "((predictions, "},
        12,
        "look printed",
        "accelerator.print(",
    ),
    (
        "accelerate_cv",
        "gather instead of gather_for_metrics, so what is repeated counts twice",
        {"gather_for_metrics": "gather"},
        8,
        "look test set",
        "enumerate(eval_dataloader)",
    ),
    (
        "accelerate_cv",
        "loss divided by num_processes, as DDP does already",
        {"backward(loss)": "backward(loss / accelerator.num_processes)"},
        3,
        "WRONG loss",
        "loss / accelerator.num_processes",
    ),
    (
        "accelerate_cv",
        "torch.save on all ranks",
        {"accelerator.save(": "torch.save(", '"num_epochs": 3': '"num_epochs": 1'},
        20,
        "WRONG files",
        "torch.save(",
    ),
    (
        "accelerate_cv",
        "loader not prepared",
        {
            "model, optimizer, train_dataloader, ": "model, optimizer, ",
        },
        3,
        "WRONG samples",
        "enumerate(train_dataloader)",
    ),
    (
        "accelerate_cv",
        "model not prepared",
        {"model, optimizer, train_dataloader, ": "optimizer, train_dataloader, "},
        3,
        "WRONG averaging",
        "",
    ),
    (
        "accelerate_cv",
        "scheduler not prepared, for the steps of a loader that is",
        {", lr_scheduler = accelerator": " = accelerator", ", lr_scheduler\n    )": "\n    )"},
        3,
        "look schedule",
        "lr_scheduler.step()",
    ),
    (
        "trainer_lm",
        "the mean of each rank's own tokens",
        {"    trainer = Trainer(\n": f"{OWN_LOSS}    trainer = Trainer(\n"},
        3,
        "WRONG",
        "loss = cross_entropy",
    ),
    (
        "trainer_lm",
        "dropout, whose seed the Trainer itself makes the same on all ranks",
        {"resid_pdrop=0.0": "resid_pdrop=0.1"},
        3,
        "look random",
        "trainer.train()",
    ),
    (
        "lightning_trainer",
        "self.log without sync_dist, monitored by a callback",
        {", sync_dist=True": ""},
        8,
        "WRONG logged",
        'self.log("val_loss"',
    ),
    (
        "lightning_trainer",
        "self.log without sync_dist, only shown",
        {", sync_dist=True": "", 'monitor="val_loss", ': ""},
        8,
        "look logged",
        'self.log("val_loss"',
    ),
    (
        "lightning_trainer",
        "loss divided by world_size, as DDP does already",
        {"        return loss\n": "        return loss / self.trainer.world_size\n"},
        3,
        "WRONG loss",
        "return loss / self.trainer.world_size",
    ),
    (
        "lightning_trainer",
        "random_split with each rank's own seed",
        {"manual_seed(42)": "manual_seed(42 + self.trainer.global_rank)"},
        3,
        "WRONG samples",
        "random_split(",
    ),
    (
        "lightning_trainer",
        "a sampler with replacement, which Lightning replaces",
        {
            "self.train, batch_size=self.batch_size, shuffle=True": "self.train, "
            "batch_size=self.batch_size, "
            "sampler=torch.utils.data.RandomSampler(self.train, replacement=True)"
        },
        3,
        "look sampler",
        "trainer.fit(",
    ),
    (
        "lightning_trainer",
        "use_distributed_sampler=False, with a sampler that gives each rank all samples",
        {"max_epochs=4": "max_epochs=4, use_distributed_sampler=False"},
        3,
        "WRONG samples",
        "trainer.fit(",
    ),
    (
        "fabric",
        "dropout with one seed",
        {"nn.ReLU(), nn.Linear(16, 2)": "nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)"},
        3,
        "WRONG random",
        "output = model(x)",
    ),
    (
        "fabric",
        "loader not set up",
        {"train_loader, test_loader = fabric": "_, test_loader = fabric"},
        3,
        "WRONG samples",
        "enumerate(train_loader)",
    ),
    (
        "tensorboard_ddp",
        "SummaryWriter on all ranks",
        {" if rank == 0 else None\ng =": "\ng ="},
        3,
        "WRONG files",
        "SummaryWriter(",
    ),
]


def changed(script, changes):
    text = (ROOT / f"tests/frameworks/{script}.py").read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def check(folder, script, changes, steps, more=(), command=(str(ROOT / "ddp_check"),)):
    """The report of ddp_check for a changed script, as JSON, and its text."""
    (folder / "script.py").write_text(text := changed(script, changes))
    flags = ["--json", "--wait", "300", "--steps", str(steps)]
    words = [sys.executable, *command, *flags, "script.py", *SCRIPTS[script][1], *more]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=900
    )
    left = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    assert left == ["script.py"], left
    return json.loads(done.stdout), text


def verify_right(report):
    assert report["status"] == 0, report["error"]
    assert not [finding for finding in report["findings"] if finding["verdict"] == "WRONG"]


def verify_fault(report, text, what, line):
    findings = [f for f in report["findings"] if f["verdict"] in ("WRONG", "look")]
    found = [f for f in findings if f"{f['verdict']} {f['rule']}".startswith(what)]
    sources = [" ".join([f["source"] or "", f["text"], *f["details"]]) for f in found]
    assert any(line in source for source in sources), findings
    if what.startswith("look"):
        verify_right(report)


@pytest.mark.long
@pytest.mark.parametrize("script, name, changes, more", RIGHT, ids=lambda part: str(part)[:40])
def test_right(tmp_path, script, name, changes, more):
    pytest.importorskip(SCRIPTS[script][0])
    verify_right(check(tmp_path, script, changes, 9, more)[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "script, name, changes, steps, what, line", FAULTS, ids=lambda part: str(part)[:40]
)
def test_fault(tmp_path, script, name, changes, steps, what, line):
    pytest.importorskip(SCRIPTS[script][0])
    verify_fault(*check(tmp_path, script, changes, steps), what, line)


@pytest.mark.long
def test_dispatched_batches(tmp_path):
    """Rank 0 reads them for all: that is not compared, and said."""
    pytest.importorskip("accelerate")
    options = CONFIGURED.replace("WITH", "dispatch_batches=True")
    changes = {"accelerator = Accelerator()": options}
    report, _ = check(tmp_path, "accelerate_cv", changes, 3)
    assert report["status"] == 2 and "dispatch_batches" in report["error"], report
