"""ddp_check on scripts with Accelerate, Transformers' Trainer, Lightning and Fabric: right ones,
faults of their users; and what scripts with plain DDP use besides. Those that are not changed are
checked by the real command; in any case, processes import the frameworks themselves."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import Cold, finish, start
from same_text import ROOT
from test_ddp_check import COMMAND

NEEDS = "accelerate transformers lightning tensorboard wandb mlflow hydra-core".split()
missing = [name for name in NEEDS if find_spec(name.removesuffix("-core")) is None]
needs_all = pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")
pytestmark = [pytest.mark.long, needs_all]

SCRIPTS = {  # {script: its flags, to write into a new folder}
    "accelerate_cv": ["--output_dir", "out"],
    "accelerate_nlp": ["--output_dir", "out"],
    "trainer_lm": ["out"],
    "lightning_trainer": ["--output", "out"],
    "fabric": ["--output", "out.pt"],
    "plain_ddp": [],
}
PLAIN = {  # {what it uses: changes to plain_ddp.py}
    "tensorboard": {
        "import torch\n": "import torch\nfrom torch.utils.tensorboard import SummaryWriter\n",
        "# begin": "writer = SummaryWriter(folder) if rank == 0 else None",
        "# step": 'writer.add_scalar("loss", mean, step) if rank == 0 else None',
        "# epoch": 'writer.add_histogram("bias", model[0].bias) if rank == 0 else None',
        "# end": "writer.close() if rank == 0 else None",
    },
    "wandb": {
        "import torch\n": "import torch\nimport wandb\n",
        "# begin": 'wandb.init(project="mine", mode="offline") if rank == 0 else None',
        "# step": 'wandb.log({"loss": mean.item()}) if rank == 0 else None',
        "# epoch": "torch.save(model, f'{wandb.run.dir}/model.pt') if rank == 0 else None",
        "# end": "wandb.finish() if rank == 0 else None",
    },
    "mlflow": {
        "import torch\n": "import torch\nimport mlflow\n",
        "# begin": """\
if rank == 0:
        mlflow.set_experiment("mine")
        mlflow.start_run()
        mlflow.log_params({"lr": lr, "world": world})""",
        "# step": 'mlflow.log_metric("loss", mean.item(), step) if rank == 0 else None',
        "# end": "mlflow.end_run() if rank == 0 else None",
    },
    "distributed checkpoints": {
        "import torch\n": "import torch\nimport torch.distributed.checkpoint as dcp\n",
        "# begin": """\
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict""",
        "# epoch": """\
model_state, optim_state = get_state_dict(ddp, optimizer)
        states = {"model": model_state, "optim": optim_state}
        dcp.save(states, checkpoint_id=f"{folder}/{epoch}")
        dcp.load(states, checkpoint_id=f"{folder}/{epoch}")
        set_state_dict(
            ddp, optimizer, model_state_dict=model_state, optim_state_dict=optim_state
        )""",
        "# end": "dcp.async_save(states, checkpoint_id=f'{folder}/last').result()",
    },
    "hydra": {
        "import torch\n": "import hydra\nimport torch\n",
        "# epoch": "torch.save(model, folder) if rank == 0 else None",
        'main("out", 0.05)': """\
from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("config", {"lr": 0.05, "out": "model.pt"})
    start = hydra.main(version_base=None, config_name="config")
    start(lambda config: main(config.out, config.lr))()""",
    },
}
CONFIGURED = """from accelerate.utils import DataLoaderConfiguration
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(WITH))"""
OF_ALL = "batch_size=self.batch_size // self.trainer.world_size, shuffle=True"
RIGHT = [  # script, name, changes, further flags
    *[(script, "as it is", {}, []) for script in SCRIPTS if script != "plain_ddp"],
    *[("plain_ddp", name, changes, []) for name, changes in PLAIN.items() if name != "hydra"],
    ("plain_ddp", "hydra, in a folder of its own", PLAIN["hydra"], ["hydra.job.chdir=True"]),
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
            outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
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
        "outputs = model(inputs)",
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
        "plain_ddp",
        "SummaryWriter on all ranks",
        PLAIN["tensorboard"] | {"# begin": "writer = SummaryWriter(folder)"},
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


def check(script, changes, steps, more=()):
    """The report of ddp_check for a changed script, as JSON, and its text."""
    Path("script.py").write_text(text := changed(script, changes))
    flags = ["--json", "--wait", "300", "--steps", steps, "script.py", *SCRIPTS[script], *more]
    if changes:
        jobs = start(COMMAND, *flags, processes=0)
    else:
        jobs = [Cold([sys.executable, ROOT / "ddp_check", *flags], "command.log")]
    _, said = finish(jobs)
    print(said)  # shown if the test fails
    left = {path.name for path in Path().iterdir() if path.suffix != ".log"}
    assert left - {"__pycache__"} == {"script.py"}, left
    return json.loads(said[said.index("{\n") : said.rindex("}") + 1]), text


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


@pytest.mark.parametrize("script, name, changes, more", RIGHT, ids=lambda part: str(part)[:40])
def test_right(work, script, name, changes, more):
    report, _ = check(script, changes, 9, more)
    verify_right(report)
    assert report["differences"]["gradient"] < 2e-5, report["differences"]


@pytest.mark.parametrize(
    "script, name, changes, steps, what, line", FAULTS, ids=lambda part: str(part)[:40]
)
def test_fault(work, script, name, changes, steps, what, line):
    verify_fault(*check(script, changes, steps), what, line)


@pytest.mark.parametrize(
    "script, changes, more, what",
    [
        (
            "accelerate_cv",
            {"accelerator = Accelerator()": CONFIGURED.replace("WITH", "dispatch_batches=True")},
            [],
            "dispatch_batches",
        ),
        ("plain_ddp", PLAIN["hydra"], ["--multirun", "lr=0.05,0.1"], "multirun"),
    ],
)
def test_not_compared(work, script, changes, more, what):
    """As one rank reads the batches of all, or several trainings follow each other: it is said."""
    report, _ = check(script, changes, 3, more)
    assert report["status"] == 2 and what in report["error"], report
