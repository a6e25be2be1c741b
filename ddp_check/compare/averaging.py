"""Gradients that the ranks have not averaged."""

from ..notes import Finding
from ..script import source
from .differences import parts_of

OF_NO_MODULE = "(of no module)"


def averaging(cause):
    """Where the ranks have other gradients: the last pass through a model that has some of
    them, and who has told it not to average them; or a second backward pass after it."""
    if not cause.unlike:
        return []
    names, _ = cause.differences.unequal_gradients(cause.step)
    seen = cause.values.of_rank.get(cause.step, [])
    passes = [v for v in seen if v.kind == "outputs"]
    losses = [v for v in seen if v.kind == "loss"]
    trained = cause.values.trained_at()
    number = cause.differences.steps[cause.step].key[0]
    unequal = {(number, name) for name in names}
    # As a GAN's generator is called before its discriminator's step.
    before = [v for v in cause.values.of_rank.get(cause.step - 1, []) if v.kind == "outputs"]
    of_names = [v for v in before + passes if unequal & trained[v.line, v.name]]
    more = []
    last = (of_names or passes)[-1:]
    for each in last:
        more.append(f"the last pass: {source(each.line)}  [{each.name}]")
        if not each.about["is_ddp"]:
            more += [f"called at {source(line)}" for line in each.about["callers"]]
    told, is_late = cause.communication.told.get(cause.step, ("", False))
    if told and not is_late:
        more += [source(told), *cause.variables.set_at(told, cause.step)]
    text, about = cause.unlike, {"remedy": "call the wrapped model"}
    if not any(v.about["is_ddp"] for v in passes) and not cause.differences.wraps:
        more += cause.communication.by_hand(cause.step)
        about["remedy"] = "average the gradients of all parameters; or wrap the model in DDP"
    if any(name.endswith(OF_NO_MODULE) for name in names):
        more += [f"a parameter: {source(at)}" for at in cause.variables.parameters()]
    about["section"], line = "#gradients", ""
    if not passes:  # as of an optimizer that steps inside of a model
        more += [source(v.line) for v in losses[-1:]]
        more.append(f"the step: {source(cause.variables.lines[cause.step])}")
    after = [loss for loss in losses if last and loss.at > last[0].at]
    if len(after) > 1 and not told and last[0].about["is_ddp"]:
        text += " The model was called through DDP, but a second backward() followed"
        line, about["remedy"] = after[-1].line, "call backward() once, of the sum of the losses"
        about["section"] = "#one-backward-for-each-forward-pass"
    if told:
        about["remedy"] = "let the last pass before the step average"
        about["section"] = "#gradient-accumulation"
    for step, seen in cause.differences.closures[:1]:
        if step <= cause.step:
            text += f" In step {step + 1} the ranks call closure() other numbers of times, by "
            text += "their losses, so their calls do not meet any more"
            line, about["remedy"] = seen.line, "return the mean loss of all ranks from it"
            about["section"] = "#an-optimizer-with-a-closure"
    outside, lines = cause.differences.outside(cause.step, names)
    if outside:
        those = "these" if outside == names else parts_of(outside)
        text += f" DDP does not average {those}: not in it, or frozen, when it wrapped"
        more += [f"{what} at {source(at)}" for at, what in lines]
        about["remedy"] = "wrap all that is trained, after it is added, replaced or thawed"
        about["section"] = "#model"
    if is_late:
        text += " This line comes after the pass, which was told not to average"
        line, about["remedy"] = told, "set it before the model is called"
    return [Finding("WRONG", "averaging", cause.step, text, line, more, **about)]
