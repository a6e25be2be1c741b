"""What is noted of a script: values, steps, collective calls. Each is one that a user may have; in
forks of this process."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from watched import notes_of

from ddp_check.notes import MANY_EVALUATIONS, Collective, End, Said, Seen, Step
from ddp_check.sketch import moved, sketch

FRAMEWORK = """
import torch

def divided(loss, by):
    return loss / (torch.tensor(by) * 1.0)

def through(module, method, *args):
    \"\"\"As Lightning's way through DDP to training_step.\"\"\"

    def wrapped_forward(*args):
        del module.forward
        return method(*args)

    module.forward = wrapped_forward
    return module(*args)
"""

VALUES = """
import os, sys, threading
import numpy as np, torch
from torch import nn
sys.path.insert(0, "site-packages")
from framework import divided, through

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(()))
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, time, x, names):
        return torch.sparse.mm(self.graph, self.layer(x)) * time, self.scale

    def update(self):
        optimizer.step()

    def training_step(self, *args):
        out, scale = self(*args)  # the pass
        return out

def train():
    net.train()  # the mode

net = Net()
shapes = nn.Linear(2, 2, device="meta")
shapes(torch.ones(1, 2, device="meta"))  # meta
optimizer = torch.optim.SGD(net.parameters(), 0.1)
train()
x, names = torch.ones(3, 4), np.array(["a", "b", "c"])
torch.func.vmap(lambda row: row @ net.layer.weight.T)(x)
torch.ones(2, 2).long() @ torch.ones(2, 2).long()
torch.vstack([torch.tensor(1.0), torch.tensor(2.0)])
torch.cat(tensors=[x, x])
x.new(1000)
x * 1j
np.random.default_rng([1, 2])
words = {f"word{number}": number for number in range(300)}
out, scale = net(torch.tensor(2.0), x, names)  # a pass
loss = divided(out.sum(), 2)
loss * net.scale
out.register_hook(lambda grad: grad)
through(net, net.training_step, torch.tensor(2.0), x, names)
torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
thread = threading.Thread(target=net.layer.bias.data.mul_, args=(1,))
thread.start()
thread.join()
net.update()
if os.fork() == 0:
    x * 3
    os._exit(0)
os.wait()
for each in [nn.BatchNorm1d(4).eval() for _ in range(25)]:
    each(x)
for batch in torch.utils.data.DataLoader(x, sampler=[2, 0]):
    pass
"""



def line_of(code, text):
    return f"train.py:{code[: code.index(text)].count(chr(10)) + 1}"


def test_values(work):
    """Tensors that are sparse, complex, of no dimension or without values, parameters that are
    given out, what a library computes, other threads and processes; with noise, too."""
    Path("site-packages").mkdir()
    Path("site-packages/framework.py").write_text(FRAMEWORK)
    (one,), (again,) = [notes_of(VALUES, run, lines=3) for run in ("one", "again")]
    assert [notes[End][0][1].state for notes in (one, again)] == ["its end"] * 2

    def seen(text, *kinds):
        line = line_of(VALUES, text)
        return {note.name: note for _, note in one.seen(*kinds) if note.line == line}

    assert seen("shapes(", "outputs")["Linear"].values == {0: None}
    assert seen("x * 1j", "value")["mul"].values[0].norm > 3
    assert not seen("x.new", "value") and not seen("x * 3", "value")
    outputs, inner = seen("out, scale = net", "outputs")["Net"], seen("    out, scale", "inputs")
    assert outputs.values[0] and outputs.values[1] is None and list(inner) == ["Net"]
    total, scaled = [seen(text, "value") for text in ("loss = divided", "loss * net")]
    assert scaled["mul"].made_from == [total["sum"].index]
    assert "hook" not in {note.kind for _, note in one[Said]}
    (mode,), (weight,), (step,) = one.seen("mode"), one.seen("weight"), one[Step]
    assert mode[1].about["set"][0] == line_of(VALUES, "net.train()")
    assert list(weight[1].values) == ["net.scale", "net.layer.weight", "net.layer.bias"]
    assert "?" not in weight[1].about.values() and "word1" not in step[1].variables
    others = {name for _, note in one.seen("other") for name in note.values}
    assert others == {"Net.graph"}
    evaluated = seen("each(x)", "evaluation", "value")
    assert list(evaluated) == ["BatchNorm1d", "batch_norm"]
    assert evaluated["BatchNorm1d"].number == MANY_EVALUATIONS - 1
