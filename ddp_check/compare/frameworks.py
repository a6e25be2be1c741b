"""Accelerate, Transformers' Trainer, Lightning, Fabric: rules of their own, and what to do in their
words."""

from ..notes import Said, Unprepared
from .rules import Rule, among

ORDER = "transformers", "lightning", "fabric", "accelerate"  # the Trainer uses Accelerate
REMEDIES = {  # {what was found: {framework: what to do}}
    "samples": {
        "accelerate": "prepare() the loader; a batch size is one per process",
        "fabric": "fabric.setup_dataloaders(loader); a batch size is one per process",
        "lightning": "use_distributed_sampler=True, or a sampler that gives each rank a share",
    },
    "averaging": {
        "accelerate": "prepare() the model, and call what it returns",
        "fabric": "fabric.setup(model, optimizer), and call what it returns",
    },
    "random": {
        "accelerate": "set_seed(seed, device_specific=True), after prepare()",
        "transformers": "torch.manual_seed(args.seed + args.process_index) in on_train_begin",
        "fabric": "torch.manual_seed(seed + fabric.global_rank) after setup",
        "lightning": "torch.manual_seed(seed + self.global_rank) in on_train_start",
    },
    "files": {
        "accelerate": "accelerator.save, or under `if accelerator.is_main_process:`",
        "transformers": "trainer.save_model, or under `if trainer.is_world_process_zero():`",
        "fabric": "fabric.save, or under `if fabric.is_global_zero:`",
        "lightning": "a callback, or under `if self.trainer.is_global_zero:`",
    },
    "printed": {
        "accelerate": "accelerator.gather_for_metrics(...) before the score",
        "fabric": "fabric.all_reduce numerators and denominators, then divide",
    },
    "test set": {"accelerate": "gather_for_metrics, which drops what is repeated"},
}


class Logged(Rule):
    name = "logged"
    right = "what Lightning logs of a whole epoch is of all ranks"
    needs = "self.log(..., on_epoch=True), as in a validation_step"
    remedy = "self.log(..., sync_dist=True)", "#scores"

    def find(self, one, ranks):
        found, seen = [], among("logged", ranks)
        for step, note, off in seen:
            if off and not note.about["synced"]:
                text, watched = f"{note.name!r} is each rank's own: rank 0's is shown", ""
                if note.about["watched"]:
                    watched = ", and each rank's callback or scheduler decides by its own"
                verdict = "WRONG" if watched else "look"
                found += self.wrong(step, note.line, text + watched, verdict=verdict)
        found.sort(key=lambda finding: finding.verdict)  # WRONG first
        return found[:1] if seen else None


class Schedules(Rule):
    name = "schedule"
    right = "schedulers for the steps of a loader are prepared, as the loader is"
    needs = "Accelerate, and a scheduler that is not prepared"
    remedy = "prepare() it, or divide its number of steps by num_processes", "#a-framework"

    def find(self, one, ranks):
        for step, note in ranks[0][Unprepared]:
            text = f"{note.name} = {note.number}, by len() of a loader before prepare(), after "
            text += f"which each rank has 1/{len(ranks)} of its batches; only a prepared scheduler "
            text += f"makes {len(ranks)} steps at each call"
            return self.look(step, note.line, text)
        return None


class Samplers(Rule):
    name = "sampler"
    right = "Lightning takes the script's samplers as they are"
    needs = "Lightning, and a sampler that it does not take"
    remedy = "use_distributed_sampler=False, and a sampler that gives each rank a share", "#loader"

    def find(self, one, ranks):
        for step, note in ranks[0][Said]:
            if note.kind == "replaced":
                line, _, name = note.text.partition(" ")
                return self.look(step, line, f"{name} is replaced by a DistributedSampler")
        return None


def in_its_words(findings, notes):
    """The remedies, for a script that uses a framework."""
    used = [note.text for _, note in notes[Said] if note.kind == "framework"]
    for framework in [name for name in ORDER if name in used][:1]:
        for finding in findings:
            is_split = any("[Subset]" in text for text in finding.more)
            if finding.what == "samples" and is_split:
                finding.remedy = "the same dataset, split and order on all ranks"
            elif finding.remedy:
                of_framework = REMEDIES.get(finding.what, {})
                finding.remedy = of_framework.get(framework, finding.remedy)
            if (finding.verdict, finding.what, framework) == ("WRONG", "random", "transformers"):
                finding.verdict = "look"
                finding.text += ": the Trainer seeds all ranks alike"
