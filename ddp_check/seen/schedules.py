"""Which lines have made an optimizer and its schedulers, and have called these."""

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from ..notes import Seen
from ..patches import wrap
from ..script import place


def made_of(optimizer):
    """{what: the lines that have done it} of this optimizer, as Step.made has them."""
    if not hasattr(optimizer, "check_lines"):  # of a class with an __init__ of its own
        optimizer.check_lines = {"made": []}
    return optimizer.check_lines


def patch(run):
    @wrap(Optimizer, "__init__")
    def make(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.check_lines = {"made": [place()[0]]}

    @wrap(Optimizer, "load_state_dict")
    def load(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        made_of(self)["loaded"] = place()[0]

    def watch_schedule(kind):
        @wrap(kind, "__init__")
        def schedule(original, self, optimizer, *args, **kwargs):
            original(self, optimizer, *args, **kwargs)
            made_of(optimizer)["made"].append(place()[0])

        @wrap(kind, "step")
        def step(original, self, *args, **kwargs):
            line, out = place()[0], original(self, *args, **kwargs)
            if run.steps:
                made_of(self.optimizer)["last"] = line
            if kind is ReduceLROnPlateau:
                number = {"number": float(args[0] if args else kwargs["metrics"])}
                run.note(Seen("plateau", line, "", run.nth("plateau", run.steps, line), number))
            return out

    watch_schedule(LRScheduler)
    watch_schedule(ReduceLROnPlateau)
