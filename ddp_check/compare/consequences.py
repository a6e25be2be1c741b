"""What follows from another finding is no finding of its own."""

from ..script import source


def due_to_plan(found, counts):
    """Where one process was given all ranks' samples, and makes more steps: by a script that plans
    its steps, and so its schedule, from the batch size of one process."""
    both = [f for f in found if f.what in ("setting", "end")]
    if len(both) == 2 and len(set(counts[1:])) == 1:
        for finding in [f for f in both if f.verdict == "WRONG"]:
            finding.verdict = "look"
            finding.text += "; are the steps planned from one process's batch size? Then by --one"


def after_orders(found):
    """The findings without those that follow from an order that is another epoch's, too: batches of
    other samples."""
    order = next((f for f in found if f.what == "order" and f.verdict == "WRONG"), None)
    rest = []
    for finding in found:
        is_batch = finding.what in ("inputs", "samples") and finding.verdict == "WRONG"
        if order and is_batch and finding.step >= order.step:
            order.more.append(so_step(finding))
        else:
            rest.append(finding)
    return rest


def after_data(found):
    """The findings without those that follow from samples which are not those of one process: these
    are WRONG then, too."""
    data = next((f for f in found if f.advice == "made apart"), None)
    if not data:
        return found
    if any(f.what == "samples" and f.verdict == "WRONG" and f.step <= data.step for f in found):
        return [finding for finding in found if finding is not data]  # of another split
    after = [f for f in found if f.what in ("inputs", "value", "loss") and f.verdict == "WRONG"]
    after = [finding for finding in after if finding.step >= data.step]
    for finding in after:
        data.verdict, data.off = "WRONG", finding.off
        data.more += [so_step(finding), *finding.more]
    return [finding for finding in found if finding not in after]


def explain_values(found):
    """The findings without what the script keeps and is not one process's: it stands below a value
    that may be made from it."""
    made = [f for f in found if f.advice in ("weights", "share") and f.verdict == "WRONG"]
    if not made:
        return found
    kept = [f for f in found if f.what in ("others", "attributes") and f.verdict == "look"]
    start = "perhaps as " * (made[0].advice != "weights")
    for each in kept:
        lines = [source(each.line)] * bool(each.line)
        made[0].more[:0] = [f"{start}{each.text}", *lines, *each.more]
    return [finding for finding in found if finding not in kept]


def name_unused(found, ends, last):
    """DDP says at its next pass that a step has left out parameters: so does the finding of its
    gradients, which are not averaged. `last`: the step before the end."""
    if any("not used in producing loss" in end for end in ends):
        for finding in [f for f in found if f.what == "averaging" and f.step == last]:
            finding.text += " The step has left out some of what DDP averages, which then waits"
            finding.remedy = "let the loss use all of it, or pass find_unused_parameters=True"


def so_step(finding):
    """In words: what follows from another finding."""
    return f"so step {finding.step + 1}: {finding.what}: {finding.text}"


def follows(finding, cause):
    """Whether tensors of a step differ because of what was found before. Before the first step,
    weights do by themselves."""
    if cause.verdict != finding.verdict or finding.what == "parameters":
        return False
    return cause.step < finding.step + (finding.what != "weight")
