"""What a script is given and what is seen of it, by small scripts, in forks of this process."""

from watched import findings_of, notes_of

from ddp_check.notes import Printed

TRAINING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = torch.utils.data.TensorDataset(torch.arange(64.).view(16, 4).sin(), torch.arange(16.))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 4 // world, sampler=sampler)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = (model(x)[:, 0] - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_numbers_of_ranks(work):
    """Python's are alike on all ranks, as on one process."""
    code = "import random\nprint(random.randint(0, 10**9))"
    (one,), ranks = notes_of(code), notes_of(code, "all")
    printed = {note.text for notes in (one, *ranks) for _, note in notes[Printed]}
    assert len(printed) == 1


def test_a_sum_for_a_mean(work):
    """A right training, and its loss without a mean; what that means is said once."""
    assert not [each for each in findings_of(TRAINING) if each.verdict in ("WRONG", "look")]
    found = findings_of(TRAINING.replace(".mean()", ".sum()"))
    (loss,) = [each for each in found if each.verdict == "WRONG"]
    assert "\n".join([loss.text, *loss.more]).count("a factor world_size too much") == 1
