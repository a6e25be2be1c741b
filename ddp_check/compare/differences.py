"""Weights, gradients, updates, buffers and settings beside those of one process."""

import functools
import os

import numpy as np

from ..notes import NOISE, PASS, Collective, Finding, Said, Step
from ..script import source
from .communication import Communication
from .fits import meaning, same, size
from .kinds import HIDES, KINDS, TENSORS, misfits, offs, paired
from .parted import averaged, averages_weights, share_parameters, without_shards
from .rules import ALIKE, among, own_draws
from .shares import takes_others


def found_in(kind, step, text, line, more=()):
    """A finding with what the kind's row says of it."""
    row = KINDS[kind]
    about = {"remedy": row.remedy, "section": row.section}
    return Finding("WRONG", kind, step, text, line, list(more), **about)


def parts_of(names, depth=None):
    """What names have in common, up to a dot; or the different ones of their first parts."""
    parts = [name.split(".") for name in names]
    depth = depth or max(1, len(os.path.commonprefix(parts)))
    return ", ".join(dict.fromkeys(".".join(part[:depth]) for part in parts))


def are_apart(names, others, depth):
    """Whether the first parts of names, up to this depth, are none of the others'."""
    both = [{tuple(name.split(".")[:depth]) for name in of} for of in (names, others)]
    return both[0].isdisjoint(both[1])


class Differences:
    """Of what the optimizers' steps have, as findings."""

    def __init__(self, one, ranks, tolerance, noise):
        self.ranks, self.findings, self.largest, self.gradients = len(ranks), [], {}, {}
        self.factors = set()  # steps in which all gradients are the same number of times as large
        self.less = set()  # and those in which it is 1 / N
        self.hidden = []  # of noise
        # Whether what a script plans from its batch size is planned for another one
        self.may_be_planned = False
        self.shards = []  # the finding of what each rank has a part of, if there is any
        self.communication = Communication(ranks[0])
        self.takes_others = functools.partial(takes_others, one, ranks)
        self.steps = {step: note for step, note in ranks[0][Step]}
        self.of_ranks = [{step: note for step, note in n[Step]} for n in ranks]
        self.wraps = any(note.made.get("wrapped") for _, note in ranks[0][Step])  # in DDP
        self.set_at = {step: seen.about for step, seen in ranks[0].seen("weight")}
        self.local = averages_weights(ranks[0], self.set_at)
        # Lines whose numbers are each rank's own, though they were given one process's; but for
        # those of buffers, as rank 0's are sent.
        self.own_draws = {seen.line for _, seen in own_draws(ranks)}
        self.own_draws -= {note.text for _, note in ranks[0][Said] if note.kind == "buffer"}
        # Steps in which the ranks have called their closures other numbers of times.
        self.closures = [(step, seen) for step, seen, found in among("closure", ranks) if found]
        # {step: gradients as they were before they were clipped}, where all have clipped them
        clipped = paired("unclipped", one, ranks)
        self.unclipped = {step: (s, of) for step, s, of in clipped if len(of) == len(ranks)}
        for kind in TENSORS:
            self.hide(kind, noise)
            self.compare(kind, one, ranks, tolerance, noise)

    def compare(self, kind, one, ranks, tolerance, noise):
        """What an optimizer's step has of one kind: each rank's beside one process's."""
        for step, seen, others in paired(kind, one, ranks):
            seen, others, shards = without_shards(step, seen, others)
            self.shards = self.shards or shards
            if (
                kind == "gradient"
                and self.communication.reduces_in_steps
                and len(others) == len(ranks)
            ):
                others = {0: averaged(others)}
            if kind == "gradient" and others:
                self.gradients.setdefault(step, []).extend(o.values for o in others.values())
            before = len(self.findings)
            for rank, other in others.items():
                of_kind = noise.get((kind, seen.line, seen.name), {})
                names = [each.values.keys() for each in others.values()]
                self.check(kind, step, seen, rank, other.values, tolerance, of_kind, names)
            values = [other.values for other in others.values()]
            if kind == "gradient" and len(self.findings) == before and step in self.unclipped:
                seen, others = self.unclipped[step]
                for rank, other in others.items():
                    self.check(kind, step, seen, rank, other.values, tolerance, of_kind)
                for finding in self.findings[before:]:
                    finding.more.append("as they were before clip_grad_norm_, which hides it")
            if kind == "buffer":
                self.judge_buffers(self.findings[before:], values, ranks[0])
            if kind == "weight" and len(values) == len(ranks):
                self.judge_weights(self.findings[before:], seen, values, ranks[0])

    def judge_buffers(self, findings, values, notes):
        """Of buffers that differ, whether the ranks have others than each other, and keep them."""
        sent = [call.line for _, call in notes[Collective] if "broad" in call.name]
        sends = any(call.name == PASS for _, call in notes[Collective])
        for finding in findings:
            if misfits("other", values[0], values[1:], ALIKE):
                # DDP may send rank 0's, as it does those of batch norm.
                finding.advice = "" if sends or sent else "unequal"
            elif sent:  # what rank 0 had
                finding.verdict = "look"
                finding.text += ", alike on all ranks; the script broadcasts: intended?"
                finding.more.append(source(sent[-1]))

    def judge_weights(self, findings, seen, values, notes):
        """Of weights that differ, whether a line of the script has set them to what a rank sends in
        this step, as centers of k-means that begin with rank 0's features."""
        for finding in findings:
            calls = [call for at, call in notes[Collective] if at == finding.step]
            sent = [call for call in calls if "broad" in call.name and call.name != PASS]
            is_set = finding.line in seen.about.values()
            if sent and is_set and not misfits("weight", values[0], values[1:], ALIKE):
                finding.verdict, finding.advice, finding.remedy = "look", "unpaired", ""
                finding.text += ", alike on all ranks, by what the script broadcasts: intended? "
                finding.text += "Nothing after it can be compared"
                finding.more.append(source(sent[-1].line))

    def hide(self, kind, noise):
        """What is not told, as noise is too large."""
        parts = {}
        for key, of_parts in noise.items():
            if key[0] == kind:
                parts |= of_parts
        wide = {part: off for part, off in parts.items() if off > HIDES}
        if wide:
            worst = max(wide, key=wide.get)
            text = f"noise of {NOISE} in the layers' outputs changes {worst} by {wide[worst]:.0e} "
            text += f"on one process: smaller faults in {len(wide)} of {len(parts)} are not seen"
            self.hidden.append(Finding("not told", kind, 0, text))

    def check(self, kind, step, seen, rank, values, tolerance, noise, all_names=()):
        """`all_names`: of the parameters that each of the ranks has."""
        on = f" on rank {rank}" if rank else ""
        missing = sorted(seen.values.keys() ^ values.keys(), key=str)
        if missing and kind == "gradient":
            if not share_parameters(seen.values.keys(), all_names):
                text = f"{missing[:3]} on one side alone{on}"
                self.findings.append(Finding("WRONG", "parameters", step, text, seen.line))
        found = misfits(kind, seen.values, [values], tolerance, noise)
        off = offs(kind, seen.values, [values])
        self.largest[kind] = max([self.largest.get(kind, 0.0), *off.values()])
        if found:
            name, off, limit = found[0]
            text = f"{len(found)} of {len(seen.values)} differ{on}; worst {name}, by "
            text += f"{off:.2g} of its size (limit {limit:.1g})"
            line = seen.about.get(name) or seen.line  # of weights and buffers, what has set it
            more = [f"called at {source(seen.about[line])}"] if line in seen.about else []
            if kind == "buffer":
                ratio, is_same, _ = common_ratio({name: seen.values[name]}, values)
                text += f"; {ratio:.4g} times one process's" * bool(is_same)
            if kind == "gradient":
                names = [part for part, _, _ in found]
                meant, is_less = self.explain(step, seen.values, values, names)
                text += meant
                if is_less:
                    self.less.add(step)
                    more = self.communication.not_differentiated()
                if meant:
                    more += self.communication.by_hand(step)
                more += [
                    f"before the ranks average, a hook gets each gradient: {source(at)}"
                    for at in self.communication.hooks[:2]
                ]
            if kind == "update":
                more += self.loaded(step)
            if seen.library:
                more = [f"in {source(seen.library)}", *more]
            self.findings.append(found_in(kind, step, text, line, more))
            self.findings[-1].off = off

    def loaded(self, step):
        """In words: where some ranks alone have loaded this optimizer's state."""
        ranks = enumerate(self.of_ranks)
        lines = {rank: of[step].made.get("loaded", "") for rank, of in ranks if step in of}
        alone = [rank for rank, line in lines.items() if line and "" in lines.values()]
        return [f"rank {rank} alone has loaded its state: {source(lines[rank])}" for rank in alone]

    def explain(self, step, one, other, names):
        """Whether all, or most, are the same number of times as large; and whether it is less. If
        not, whether those that differ are. `names`: of these."""
        few = {name: one[name] for name in names}
        ratio, alike, number = common_ratio(few, other)
        meant = meaning(ratio, self.ranks) if alike == number and len(few) < len(one) / 2 else ""
        ratio, alike, number = common_ratio(one, other)
        if meant or alike < max(0.8 * number, 1):
            return meant, False
        if alike == number and abs(ratio - 1) > 0.3:
            self.factors.add(step)
        text = meaning(ratio, self.ranks)
        if alike < number:
            text = text.replace("one process's", f"one process's in {alike} of {number}", 1)
        return text, abs(ratio * self.ranks - 1) < 0.05

    def of(self, *kinds):
        return sorted([f for f in self.findings if f.what in kinds], key=lambda f: f.step)

    def unequal_gradients(self, step):
        """The names of a step's parameters of which each rank has its own gradient, and of the
        others; not of those whose gradients are nothing."""
        ranks, unequal, equal = self.gradients.get(step, [{}]), [], []
        for name in ranks[0]:
            found = [of_rank[name] for of_rank in ranks if name in of_rank]
            largest = max(map(size, found))
            if largest > 1e-12:
                is_unequal = same(found[0], found) > 1e-3 * largest
                (unequal if is_unequal else equal).append(name)
        return unequal, equal

    def outside(self, step, names):
        """Those of `names` that no DDP averages, if it averages others; [(line, what it did)]."""
        note = self.steps.get(step)
        if note is None or not note.averaged:
            return [], []
        names = [name for name in names if name not in note.averaged]
        lines = [(line, "wrapped") for line in note.made["wrapped"]]
        set_at = [self.set_at.get(step, {}).get(name) for name in names]
        return names, lines + [(line, "set") for line in dict.fromkeys(set_at) if line][:2]

    def unlike(self, step):
        """How the ranks' gradients of a step differ from each other; None if they do not."""
        unequal, _ = self.unequal_gradients(step)
        if not unequal:
            return None
        always = {name for at in self.gradients for name in self.unequal_gradients(at)[0]}
        right = [name for at in self.gradients for name in self.unequal_gradients(at)[1]]
        right = [name for name in right if name not in always]
        depth = next((n for n in range(1, 9) if are_apart(unequal, right, n)), 9) if right else None
        text = f"each rank has its own gradient of {parts_of(unequal, depth)[:200]}"
        if right:
            text += f", but not of {parts_of(right, depth)[:200]}"
        return f"{text}: not averaged in this step?"


def common_ratio(one, other):
    """(How many times as large the tensors of another process are, of how many of them that is
    true, how many there are), but for those that are nearly nothing."""
    least = 1e-2 * sum(size(each) ** 2 for each in one.values()) ** 0.5
    large = [(v, other.get(k)) for k, v in one.items() if size(v) > least and other.get(k)]
    ratios = [float(a.sums @ b.sums) / max(float(a.sums @ a.sums), 1e-30) for a, b in large]
    ratio = float(np.median(ratios or [1.0]))
    return ratio, sum(same_ray(a, b, ratio) for a, b in large), len(large)


def same_ray(one, other, ratio):
    return np.linalg.norm(other.sums - ratio * one.sums) < 0.2 * abs(ratio) * max(size(one), 1e-30)
