"""Learning rates and other settings of optimizers, beside those of one process."""

from ..notes import Step
from ..patterns import RATE, scales_in
from ..script import source
from ..text import branch_of, calls_of, lines_that_set
from .differences import found_in
from .fits import sides
from .kinds import misfits, paired


def compare_settings(one, ranks, variables):
    """Learning rates and such, on any rank: the first that differs."""
    steps = {note.key: note for _, note in one[Step]}
    for step, seen, others in paired("setting", one, ranks):
        values = [other.values for other in others.values()]
        if any(of_rank.keys() != seen.values.keys() for of_rank in values):
            continue  # other groups of parameters
        for (group, name), off, _ in misfits("setting", seen.values, values, 0):
            numbers = [of_rank[group, name] for of_rank in values]
            number = seen.values[group, name]
            text = f"{name} is {sides(number, *numbers)}"
            elsewhere = [at for file in variables.files for at in lines_that_set(f"{file}:1", name)]
            set_at = lines_that_set(seen.line, name) or elsewhere[:3]
            set_at = [at for at in set_at if "param_groups" not in source(at).partition("=")[2]]
            is_scaled = number and abs(numbers[0] / number / len(ranks) - 1) < 0.01
            if step == 0 and is_scaled:
                text += f"; {len(ranks)} times: is the batch of all ranks that much larger, too? "
                text += "If so, give one process this rate by --one"
            key = int(seen.name.split()[1]), seen.number
            made = steps[key].made
            lines = dict.fromkeys([*made.get("made", []), *set_at])
            more = [f"made or set at {', '.join(lines)}"] if lines else []
            if last := made.get("last"):
                more.append(f"last scheduler.step(): {source(last)}")
                lines[last] = None
            if len(set(numbers)) > 1:  # as of rank 0 alone
                calls = [at for line in set_at for at in calls_of(line, variables.files)]
                branches = dict.fromkeys(map(branch_of, [*calls, *set_at]))
                more += [f"by {source(branch)}" for branch in branches if branch][:2]
            behind = variables.behind(list(lines), step)
            if is_scaled and not behind and RATE.search(name):
                scales = [line for file in variables.files for line in scales_in(file)]
                behind = [f"a rate by the number of processes: {source(at)}" for at in scales[:2]]
            more += behind
            found = found_in("setting", step, text, seen.line, more)
            found.advice = "world" if is_scaled else ""
            if len(set(numbers)) > 1:
                found.remedy = "set it alike on all ranks, by what all ranks have"
            if not is_scaled and len(set(numbers)) == 1 and variables.plans(step):
                found.advice = "plan"
            yield found
