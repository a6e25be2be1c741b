"""Rules on what the script keeps: weights that no optimizer has, buffers, tensors, modes."""

from ..notes import MANY_EVALUATIONS, PASS, Collective, Step
from ..script import source
from ..text import branch_of, lines_that_set
from .fits import size
from .kinds import misfits, offs, paired
from .numbers import BY_RANK, Variables, files_of
from .rules import ALIKE, Rule, among, is_marked, own_draws


def callers_of(seen, line):
    """In words: where the function of a line that has set a tensor was called, and the `if` of the
    line, or of that."""
    called = seen.about.get(line)
    lines = [f"called at {source(called)}"] if called else []
    branches = [branch for branch in map(branch_of, filter(None, (line, called))) if branch]
    return lines + [source(branch) for branch in branches[:1]]


def used_elsewhere(ranks):
    """The line by which another rank than 0 evaluates a model that no optimizer trains, with other
    weights than rank 0's, before it communicates; "" if none does."""
    mine = {seen.about.get("weights") for _, seen in ranks[0].seen("evaluation")}
    for notes in ranks[1:]:
        calls = [(step, call) for step, call in notes[Collective] if call.name != PASS]
        for step, seen in notes.seen("evaluation"):
            counts = any(at == step and call.at > seen.at for at, call in calls)
            if counts and seen.about.get("weights") not in {None, *mine}:
                return seen.line
    return ""


def is_copy(name, shape, rank):
    """Whether a weight has the name and shape of a trained one, as in an average of the model's."""
    weights = [seen.values for _, seen in rank.seen("weight")]
    trained = {(part, w.shape) for of in weights for part, w in of.items() if "." in part and w}
    return any(f".{name}".endswith(part[part.find(".") :]) and of == shape for part, of in trained)


class OtherWeights(Rule):
    name = "others"
    right = "weights and buffers that no optimizer has are those of one process"
    needs = "a teacher, an average of weights, a bank, a codebook"
    remedy = "build and update them alike on all ranks, from what all ranks have", "#model"

    def find(self, one, ranks):
        if found := self.drawn(ranks):
            return found
        seen = False
        for step, note, others in paired("other", one, ranks):
            values = [other.values for other in others.values()]
            seen = seen or bool(note.values and values)
            for rank, of_rank in enumerate(values):
                for part, off, _ in misfits("other", note.values, [of_rank], ALIKE)[:1]:
                    text = f"{part} on rank {rank} differs from one process's by {off:.0e}"
                    text += self.who(rank, part, values)
                    line = note.about.get(part.rstrip("'"), "")
                    lines = [at for at in (line, note.about.get(line)) if at]
                    more = callers_of(note, line) + Variables(one, ranks).behind(lines, step)
                    return self.look(step, line, text, more)
        return [] if seen else None

    def who(self, rank, part, values):
        """Which ranks have the same."""
        if rank:
            return ", and rank 0's does not: right if only rank 0 uses it"
        if not misfits("attribute", {part: values[0][part]}, values[1:], ALIKE):
            return ", but is alike on all ranks: does a rate or a count contain world_size?"
        return ", and the ranks differ from each other"

    def drawn(self, ranks):
        """Weights of each rank's own random numbers."""
        draws = own_draws(ranks)
        note_of = dict(ranks[0][Step])
        alike = self.averaged_by_hand(ranks) if draws else {}
        for kind in ("weight", "other", "buffer") if draws else ():
            for step, note, others in paired(kind, ranks[0], ranks):
                off = offs(kind, note.values, [other.values for other in others.values()], "same")
                marked = [part for part in off if is_marked(off[part])]
                averaged = note_of[step].averaged if step in note_of else []  # if wrapped later
                marked.sort(key=lambda part: part not in averaged)
                before = [seen for at, seen in draws if at <= step]
                if marked and before:
                    line = note.about.get(marked[0].rstrip("'")) or before[-1].line
                    seeded = dict.fromkeys(seen.about["seeded"] for seen in before)
                    more = [f"seeded at {source(at)}" for at in seeded if at][:2]
                    more = callers_of(note, line) + more
                    text = f"{marked[0]} has each rank's own random numbers"
                    if marked[0] in averaged:
                        text += ", drawn after DDP has sent rank 0's: it averages gradients only"
                        return self.wrong(step, line, text, more)
                    if kind == "weight" and alike.get(step, set()).issuperset(marked):
                        text += ", which no rank sends, but the gradients of all ranks"
                        return self.wrong(step, line, text, more)
                    text += ", and DDP does not send it"
                    used = used_elsewhere(ranks) if kind == "other" else ""
                    if used and is_copy(marked[0], note.values[marked[0]].shape, ranks[0]):
                        text += ", but other ranks than 0 evaluate it"
                        return self.wrong(step, line, text, [source(used), *more])
                    return self.look(step, line, text, more)
        return []

    def averaged_by_hand(self, ranks):
        """{step: the names of gradients that are the same to the last digit on all ranks}; none if
        some are not, as a bias may have the same anyway"""
        found = {}
        for step, note, others in paired("gradient", ranks[0], ranks):
            off = offs("gradient", note.values, [o.values for o in others.values()], "same")
            large = [part for part in off if size(note.values[part])]
            if not any(off[part] for part in large):
                found.setdefault(step, set()).update(large)
        return found


class Attributes(Rule):
    name = "attributes"
    right = "tensors that the script's objects keep are those of one process, or add up to them"
    needs = "an object with a tensor as an attribute: a queue, a center, a running mean"
    remedy = "gather or all_reduce what it is made from", "#buffers"

    def find(self, one, ranks):
        seen = False
        for step, note, others in paired("attribute", one, ranks):
            values = [other.values for other in others.values()]
            if len(values) < len(ranks):
                continue
            kept = {  # one that has other shapes is of a batch
                part: sketch
                for part, sketch in note.values.items()
                if all(part in of and of[part].shape == sketch.shape for of in values)
            }
            seen = seen or bool(kept)
            for part, off, _ in misfits("attribute", kept, values, ALIKE):
                text = f"{part} differs from one process's by {off:.0e}, and is neither "
                name = part.rpartition(".")[2]
                files = files_of(ranks[0])
                lines = [at for file in files for at in lines_that_set(f"{file}:1", name)]
                more = [f"set at {source(line)}" for line in lines[:3]]
                return self.look(step, "", f"{text}its mean nor its sum", more)
        return [] if seen else None


class Plateau(Rule):
    name = "plateau"
    right = "ReduceLROnPlateau gets the same number on all ranks"
    needs = "ReduceLROnPlateau"
    remedy = "give it the score of all ranks", "#decisions"

    def find(self, one, ranks):
        seen = among("plateau", ranks)
        for step, note, found in seen:
            if found:
                text = f"rank 0 gives it {note.values['number']:.6g}, another rank another number: "
                return self.wrong(step, note.line, f"{text}each rank decides by its own")
        return [] if seen else None


class Evaluation(Rule):
    name = "evaluation"
    right = "a model's buffers are equal on all ranks when it is evaluated"
    needs = "a pass through a model after eval(): --short 10"
    remedy = "broadcast rank 0's buffers before it", "#buffers"

    def find(self, one, ranks):
        evaluations = among("evaluation", ranks)  # none if only rank 0 evaluates
        for step, seen, found in evaluations:
            for part, _, _ in found[:1]:
                text = f"{part} is another one on each rank: right if only rank 0's score counts"
                called = [f"called at {source(line)}" for line in seen.about["callers"]]
                return self.look(step, seen.line, text, called)
        return self.at_other_steps(one, ranks) or [] if evaluations else None

    def at_other_steps(self, one, ranks):
        """A line that evaluates after other steps than on one process."""
        theirs = [{} for _ in (one, *ranks)]  # of each process: {line: {steps}}
        for of, notes in zip(theirs, (one, *ranks)):
            for step, seen in notes.seen("evaluation"):
                of.setdefault(seen.line, {}).setdefault(step, seen)
        last = min(len(notes[Step]) for notes in (one, *ranks))
        for line, of_one in theirs[0].items():
            both = [sorted(step for step in of.get(line, {}) if step < last) for of in theirs]
            if all(both[1:]) and both[0] != both[1] and len(of_one) < MANY_EVALUATIONS:
                text = (
                    f"evaluated after {both[0][:4]} steps on one process, {both[1][:4]} on rank 0"
                )
                called = of_one[min(of_one)].about["callers"]
                branches = [branch for branch in map(branch_of, [line, *called]) if branch]
                more = [f"called at {source(at)}" for at in called]
                for branch in branches[:1]:
                    numbers = Variables(one, ranks).behind([branch], min(of_one))
                    more += [source(branch), *numbers]
                remedy = "count what all ranks have done"
                return self.look(min(both[0] + both[1]), line, text, more, remedy)
        return []


def set_by(seen):
    """In words: the line that has set a mode, and what has called that."""
    lines = seen.about["set"]
    return " < ".join([source(line) for line in lines[:1]] + list(lines[1:]))


class Modes(Rule):
    name = "modes"
    right = "all ranks train the same modules in training mode as one process does"
    needs = "an optimizer.step()"
    remedy = "call train() and eval() on all ranks alike", "#decisions"

    def find(self, one, ranks):
        pairs = list(paired("mode", one, ranks))
        for step, seen, others in pairs:
            for rank, other in others.items():
                modes = other.values
                found = misfits("mode", seen.values, [modes], 0)
                if found and modes.keys() == seen.values.keys():
                    name = found[0].part
                    where = "one process" if modes[name] else f"rank {rank}"
                    text = f"{name} (of {len(found)}) is in evaluation mode on {where} alone"
                    more = [
                        f"last train() or eval() on one process: {set_by(seen)}",
                        f"last train() or eval() on rank {rank}: {set_by(other)}",
                    ]
                    sides = (other, seen) if modes[name] else (seen, other)
                    return self.wrong(step, self.set_alone(*sides) or seen.line, text, more)
        return [] if any(others for _, _, others in pairs) else None

    def set_alone(self, in_training, in_evaluation):
        """The line that has set the mode of one side alone: which an `if` keeps to some ranks, or
        else the last one of the side in evaluation mode."""
        lines = [seen.about["set"] for seen in (in_evaluation, in_training)]
        for line in [at for of in lines for at in of]:
            branch = branch_of(line)
            if branch and BY_RANK.search(source(branch).removeprefix(branch)):
                return line
        return next(iter(lines[0]), "")
