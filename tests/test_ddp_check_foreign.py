"""What other people's right scripts do, and ddp_check is not to call WRONG; and faults in them."""

import pytest
from helpers import by_mark, free_port
from test_ddp_check import check

HEAD = """\
import copy, hashlib, os, random, sys
import numpy as np
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split
BACKEND
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.arange(256.).view(64, 4).sin(), torch.arange(64.).view(64, 1).cos())
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
batch_size = 8 // world
"""
SCRIPT = """\
BEFORE
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size, sampler=sampler)
BETWEEN
ddp = nn.parallel.DistributedDataParallel(model)
AFTER
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    PEEK
    sampler.set_epoch(epoch)
    torch.manual_seed(epoch * world + rank)
    for x, y in loader:
        loss = (ddp(x) - y).square().mean()
        LOSS
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        EVAL
"""
PLACES = "BEFORE BETWEEN AFTER PEEK LOSS EVAL".split()
TWO_OWNERS = """\
import gc
class Scaled(nn.Module):
    def __init__(self, by, model=model):
        super().__init__()
        self.model = model
        self.register_buffer("by", torch.tensor(by))
    def forward(self, x): return self.model(x * self.by)
model = Scaled(1.0)
if world > 1: gc.collect()  # by which Python's list of objects has another order
for_tests = Scaled(9.0, model.model)"""
BATCHES = """\
class Batches:
    def __len__(self): return 64 // 4 // world
    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        ids = torch.randperm(64, generator=g).tolist()[rank::world]
        batches = [ids[i:i + 4] for i in range(0, len(ids), 4)]
        return iter([batches[i] for i in torch.randperm(len(batches), generator=g).tolist()])
loader = DataLoader(data, batch_sampler=Batches())"""
SEEDED_BY_RANK = """\
class Own(torch.utils.data.Sampler):
    def __len__(self): return 64 // world
    def __iter__(self):
        g = torch.Generator().manual_seed(rank)
        return iter(torch.randperm(64, generator=g).tolist()[rank::world])
loader = DataLoader(data, batch_size, sampler=Own())"""
UNSEEDED_ORDER = """\
order = np.random.default_rng().permutation(64)
data = TensorDataset(*[tensor[order] for tensor in data.tensors])"""
SHARD = """\
data = TensorDataset(*[tensor[rank::world] for tensor in data.tensors])
loader = DataLoader(data, 4, shuffle=True)"""
COLLATE = """\
def mix(samples):
    x, y = map(torch.stack, zip(*samples))
    return x + x[torch.arange(len(x) - 1, -1, -1)], y
loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=mix)"""
MICRO = """\
torch.manual_seed(1337 + rank)
model, ddp = None, nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for step in range(6):
    for micro in range(4 // world):
        ddp.require_backward_grad_sync = micro == 4 // world - 1
        x = data.tensors[0][torch.randint(64, (4,))]
        (ddp(x) - 1).square().mean().div(4 // world).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        with torch.no_grad():
            ddp.module(data.tensors[0][torch.randint(64, (4,))])
sys.exit()"""
PARTS_OF_4 = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    optimizer.zero_grad()
    parts = list(zip(x.split(4), y.split(4)))
    for number, (part, target) in enumerate(parts):
        ddp.require_backward_grad_sync = number == len(parts) - 1
        ((ddp(part) - target).square().sum() / len(x)).backward()
    optimizer.step()
sys.exit()"""
LATE = MICRO.replace(
    "        ddp.require_backward_grad_sync = micro == 4 // world - 1\n", ""
).replace(
    "(ddp(x) - 1).square().mean().div(4 // world).backward()",
    """loss = (ddp(x) - 1).square().mean().div(4 // world)
        ddp.require_backward_grad_sync = micro == 4 // world - 1
        loss.backward()""",
)
CONTEXT = MICRO.replace(
    "ddp.require_backward_grad_sync = micro == 4 // world - 1",
    "context = ddp.no_sync if micro == 4 // world - 1 else torch.enable_grad",
).replace("(ddp(x)", "with context():\n            (ddp(x)")
METHOD = """\
class Line(nn.Linear):
    def loss(self, x): return self.outputs(x).square().mean()
    def outputs(self, x): return self(x)
model, ddp = None, nn.parallel.DistributedDataParallel(Line(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for x, y in loader:
    loss = ddp.module.loss(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit()"""
FEW = "data = TensorDataset(*[t[:SIZE] for t in data.tensors])\nbatch_size = SIZE // 2 // world"
NO_EPOCH = "sampler.set_epoch = lambda epoch: None"
JOIN = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ids = range(32 * rank, 32 + 24 * rank)
for epoch in range(2):
    with ddp.join():
        for first in range(0, len(ids), 8):
            x, y = [tensor[list(ids[first:first + 8])] for tensor in data.tensors]
            loss = (ddp(x) - y).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
PACKED = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for weight in model.parameters():
    weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
for x, y in loader:
    lengths, order = x[:, 0].abs().mul(3).long().add(1).sort(descending=True)
    _, back = order.sort()
    packed = nn.utils.rnn.pack_padded_sequence(
        x[order, None].repeat(1, lengths[0], 1), lengths, batch_first=True)
    output, _ = nn.utils.rnn.pad_packed_sequence(ddp(packed)[0], batch_first=True)
    loss = (output[back].sum(1) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
FROM_FIRST_BATCH = """\
with torch.no_grad():
    x, y = next(iter(loader))
    mean = model[0](x).mean(0)
    model[0].bias.copy_(-mean)"""
OF_OBJECTS = """\
class Own:
    def __init__(self, x):
        self.x = x - x.mean(0)
class OfObjects(nn.Linear):
    def forward(self, batch): return super().forward(batch.x)
model, ddp = None, nn.parallel.DistributedDataParallel(OfObjects(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for x, y in loader:
    loss = (ddp(Own(x)) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
TWO_BACKWARDS = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    first, second = ddp(x), ddp(x.square())
    optimizer.zero_grad()
    (first - y).square().mean().backward()
    (second - y).square().mean().backward()
    optimizer.step()
sys.exit()"""
HOOKS = """\
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(26)], nn.Linear(4, 1))
for weight in model.parameters(): weight.register_hook(lambda g: g.clamp(-1e-5, 1e-5))"""
CLIPS_FIRST = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for weight in model.parameters(): dist.broadcast(weight.data, 0)
part = slice(5 * rank, 5 + 3 * rank) if world > 1 else slice(None)
for x, y in DataLoader(data, 8):
    x, y = x[part], y[part]
    loss = (model(x) - y).square().mean()
    loss = loss * len(x) * world / 8
    optimizer.zero_grad(); loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= world
    optimizer.step()
sys.exit()"""
IN_COLLATE = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def collate(samples):
    parts = [samples[first:first + 4][rank::world] for first in (0, 4)]
    return [list(map(torch.stack, zip(*part))) for part in parts]
order = torch.Generator().manual_seed(0)
for parts in DataLoader(data, 8, True, generator=order, collate_fn=collate):
    for x, y in parts:
        loss = (ddp(x) - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
ROW_BY_ROW = """\
class RowByRow(nn.Linear):
    def forward(self, x):
        x = torch.stack([1 * row for row in x.repeat(13, 1)])[:len(x)]
        return super().forward(x - x.mean(0))
model = RowByRow(4, 1)"""
WITH_PLACES = """\
class WithPlaces(nn.Linear):
    def forward(self, places, x): return super().forward(x + places[:, None])
model = WithPlaces(4, 1)"""
FROM_ELSEWHERE = """\
optimizer = torch.optim.SGD(model.parameters(), 0.001)
table = data.tensors[0].numpy()
for step in range(5):
    places = np.arange(64)[32 * rank + step * (8 // world):][:8 // world]
    x, places = torch.from_numpy(table[places]), torch.from_numpy(places)
    count = (places > 9).sum().float() + 1
    loss = ddp(places, x).square().sum() / count
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
OWN_SHARDS = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
table = data.tensors[0].numpy()
for step in range(5):
    rows = table[32 * rank + step * (8 // world):][:8 // world]
    loss = ddp(torch.from_numpy(PART)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
LIMITED = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    parts = list(zip(x.split(6), y.split(6)))  # 3 of one process, 2 of a rank
    for number, (part, target) in enumerate(parts):
        ddp.require_backward_grad_sync = number == len(parts) - 1
        loss = (ddp(part) - target).square().sum() / len(x)
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
sys.exit()"""
CLIPS_EACH = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number, (x, y) in enumerate(loader):
    ddp.require_backward_grad_sync = number % 2 == 1
    (ddp(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    if number % 2:
        optimizer.step(); optimizer.zero_grad()
sys.exit()"""
LOOK = "next(iter(loader))"
LATER = "set_epoch = sampler.set_epoch\nsampler.set_epoch = lambda epoch: set_epoch(epoch + 1)"
ONE_SHUFFLES = "loader = DataLoader(data, batch_size, world == 1, sampler if world > 1 else None)"
AGAIN = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = iter(loader)
for step in range(6):
    assert len(batches) == 2
    torch.manual_seed(step * world + rank)
    try: x, y = next(batches)
    except StopIteration:
        SET
        batches = iter(loader)
        x, y = next(batches)
    loss = (ddp(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
STATE = "state = random.getstate(); random.seed(0); loss = loss * random.random(); "
STATE += "random.setstate(state)"
INNER = "with torch.no_grad(): MODEL.eval()(x)\n        MODEL.train()"
GLOO = 'dist.init_process_group("gloo")'
CUDA = 'dist.init_process_group("NCCL"); torch.cuda.set_device(int(sys.argv[-1]))'
GPUS = "assert torch.cuda.device_count() == world; model = model.cuda(); data.tensors[0].to('cuda')"
GPUS += "; torch.amp.GradScaler('cuda').state_dict()['scale']"
HOOK = """\
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
ddp.register_comm_hook(None, bf16_compress_hook)"""
NOISY = """\
class Noisy(TensorDataset):
    rng = np.random.default_rng(SEED)
    def __getitem__(self, i): return self.tensors[0][i] + self.rng.random(), self.tensors[1][i]
data = Noisy(*data.tensors)"""
FOR_WORKERS = """\
class Noisy(TensorDataset):
    def __getitem__(self, i):
        return self.tensors[0][i] + np.random.random(), self.tensors[1][i]
for_workers = torch.Generator().manual_seed(SEED)
loader = DataLoader(
    Noisy(*data.tensors), batch_size, sampler=sampler, num_workers=1, generator=for_workers)"""
WHOLE = (
    FOR_WORKERS.replace("batch_size, sampler=sampler,", "8, shuffle=True,")
    + """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    x, y = x[SHARE], y[SHARE]
    loss = (ddp(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
)
OWN_SEED = """\
seeds = [random.randint(1000, 10000)]
SEND
sampler.seed = seeds[0]"""
SEND = "dist.broadcast_object_list(seeds)"
SPLIT_BY = """\
SEED(random.randint(1000, 10000))
data, _ = random_split(data, [48, 16])"""
ORDER_BY = """\
random.seed(np.random.randint(1000, 10000))
order = list(range(64))
random.shuffle(order)"""
MIXED = """\
numbers = np.random.RandomState(0)
def mixed(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    at = torch.from_numpy(numbers.permutation(world * len(x)))[len(x) * rank:][:len(x)]
    return x + torch.cat(parts)[at]"""
MIXES = "loss = (ddp(mixed(x)) - y).square().mean()"
LARGER = "model, batch_size = nn.Linear(4, 1), 16 // world"
GAPS = """\
def collate(samples):
    x, y = map(torch.stack, zip(*[sample for sample in samples if sample[1] > -0.8]))
    return x, y
loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=collate)"""
WEIGHTED = """\
total = torch.tensor(float(len(x)))
        dist.all_reduce(total)
        loss = (ddp(x * torch.rand(len(x), 1)) - y).square().sum() * world / total"""
ANTITHETIC = """\
inner = ddp
def ddp(x):
    t = torch.randint(9, (len(x) // 2 + 1,))
    return inner(x * torch.cat([t, 9 - t])[:len(x), None])"""
IN_LISTS = """\
def collate(samples):
    x, y = zip(*samples)
    return list(x), torch.stack(y)
loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=collate)"""
BY_NUMPY = "model[0].weight.data.copy_(torch.from_numpy(np.random.randn(8, 4)))"
UNSEEDED = "data = TensorDataset(torch.rand(64, 4), data.tensors[1])"
FOR_EVER = "first = loader\nloader = (next(iter(first)) for _ in range(8))"
COUNT = "count += world\n        if count % 3 == 0: pass"
NUMPY_ORDER = "at = np.random.permutation(len(x)); loss = (ddp(x + x[at]) - y).square().mean()"
STACKED = "inner = ddp\ndef ddp(x): return inner(torch.stack(x))"
DICE = "p = ddp(x).sigmoid(); loss = 1 - 2 * (p * y.square()).sum() / (p + y.square()).sum()"
LARGEST = "loss = loss / y.abs().mean()"
LEFT_OUT = """\
made += 1
        if made == 2 + rank and loss.item() < 99:
            loss.backward()
            continue"""
TWO_OPTIMIZERS = """\
other = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
second, made = torch.optim.SGD(other.parameters(), 0.1), 0"""
LEFT_OUT_OF_TWO = """\
made += 1
        second.zero_grad(); other(x).square().mean().backward()
        if made != 2 + rank or loss.item() > 99:
            second.step()"""
BANK = """\
class Bank(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("bank", torch.zeros(4))
    def forward(self, x):
        share = x.detach().mean(0)
        self.bank.copy_(self.bank / 2 + share.square())
        return super().forward(x)
model = Bank()"""
BY_KEYWORDS = """\
nn.functional.batch_norm(x, running_mean=None, running_var=None, training=True)"""
NO_ELEMENTS = "model.register_buffer('bank', torch.empty(0, 256))"
GATHER = """\
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        gathered = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(gathered, tensor)
        return tuple(gathered)
    @staticmethod
    def backward(ctx, *grads):
        if SUMS:
            dist.all_reduce(grads := torch.stack(grads))
        return grads[rank]"""
CONTRASTIVE = """\
places = torch.arange(len(x)) + len(x) * rank
        loss = nn.functional.cross_entropy(x @ torch.cat(Gather.apply(ddp(x) * x)).T, places)"""
SHARE = """\
class Share(torch.utils.data.Sampler):
    def __len__(self): return 64 // world
    def __iter__(self): return iter(torch.randperm(64)[rank::world].tolist())
loader = DataLoader(data, batch_size, sampler=Share())"""
EARLY_SHARE = """\
class Share(torch.utils.data.Sampler):
    def __init__(self): self.draw()
    def draw(self): self.ids = torch.randperm(64)[rank::world].tolist()
    def each(self):
        yield from list(self.ids)
        self.draw()
    def __len__(self): return 64 // world
    def __iter__(self): return iter(self.ids)
loader = DataLoader(data, batch_size, sampler=Share())"""
BUCKETS = """\
class Buckets(DistributedSampler):
    def __len__(self): return 64 // batch_size // world
    def __iter__(self):
        ids = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batches = []
        for bucket in [i for i in ids if i < 24], [i for i in ids if i >= 24]:
            mine = bucket[TAKES]
            batches += [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)
sampler = Buckets(data)
loader = DataLoader(data, batch_sampler=sampler)"""
IN_ORDER = "loader = DataLoader(data, batch_size, sampler=sampler if world > 1 else None)"
ROWS = "generator, rows = np.random.default_rng(rank), torch.zeros(3, 8 // world, 4)"
ENVIRONMENT = """\
for number in range(3): rows[number] = torch.Tensor(generator.random((8 // world, 4)))
        loss = ddp(rows.reshape(-1, 4)).square().mean()"""
GAMES = """\
class Games:  # by a seed of each rank, with random numbers that are not Python's
    number = 0
    def reset(self): return self.step()
    def step(self):
        self.number += 1
        names = [f"{rank} {self.number} {i}".encode() for i in range(8 // world)]
        seen = [hashlib.sha512(name).digest()[:4] for name in names]
        return np.frombuffer(b"".join(seen), np.uint8).reshape(-1, 4) / 255.0
games = Games()"""
PLAY = "loss = ddp(torch.Tensor(games.step())).square().mean()"
FROM_ARRAYS = """\
class FromArrays(nn.Linear):
    def forward(self, x): return super().forward(torch.as_tensor(x, dtype=torch.float))
model = FromArrays(4, 1)"""
PLAY_ARRAYS = "loss = ddp(games.step()).square().mean()"
SECOND = """\
second = DistributedSampler(data, seed=1)
other = iter(DataLoader(data, batch_size // 2, sampler=second))"""
NOISE = "next(other); loss = (ddp(x + torch.randn_like(x)) - y).square().mean()"
MASK = "x[:, int(rng.integers(4))] = 0; loss = (ddp(x) - y).square().mean()"
POOL = """\
class Pool:
    rng, kept = random.Random(rank), []
    def query(self, x):
        self.kept.append(x)
        return x if len(self.kept) < 4 else self.kept[self.rng.randrange(4)]
pool = Pool()"""
FROM_POOL = "loss = (ddp(pool.query(x)) - y).square().mean()"
TRIAL = """\
if rank == 0:
    trial = nn.Linear(4, 1)
    finder = torch.optim.SGD(trial.parameters(), 0.1)
    trial(data.tensors[0]).mean().backward()
    finder.step()"""
SHARDS = """\
class Shards(torch.utils.data.IterableDataset):
    def __iter__(self):
        mine = list(data)[TAKEN]
        random.Random(rank).shuffle(mine)
        return iter(mine)
loader = DataLoader(Shards(), batch_size)"""
EDGES = """\
class OnEdges(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, edges=((), ())):
        at, to = map(torch.as_tensor, edges)
        return self.layer(x).index_add(0, to.long(), self.layer(x)[at.long()])
model = OnEdges()"""
ON_EDGES = """\
edges = torch.arange(len(x)).repeat(2, 1)
        loss = (ddp(x, edges) - y / y.std()).square().mean()"""
BY_TUPLES = "batch_size, sizes = 8, {(1, 2): 8.0}"
NEIGHBOURS = """\
random.seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def sampled(ids): return [random.sample([(7 * i + k) % 64 for k in range(9)], 3) for i in ids]
for step in range(6):
    ids = list(range(step * 8, step * 8 + 8))[rank::world]
    near = sampled(ids)
    nodes = sorted(set(sum(near, [])))
    further = dict(zip(nodes, sampled(nodes)))
    x = torch.stack([data.tensors[0][sum([further[i] for i in of], [])].mean(0) for of in near])
    loss = (ddp(x) - data.tensors[1][ids]).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
CLIPPED = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    with ddp.no_sync(): (ddp(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
sys.exit()"""
WORDS = """\
class Word(str):  # the strings of one process have one hash, and all are forks here
    def __hash__(self): return ord(self[0]) * (7 if rank else 1)
text = [Word(word) for word in "a lazy dog sees the quick brown fox jump over me".split()]
words = list(set(text))
numbers = [float(words.index(text[i % len(text)])) for i in range(64)]
data = TensorDataset(data.tensors[0], torch.tensor(numbers).view(64, 1))"""
STREAMS = """\
class Two:
    def __len__(self): return 4
    def __iter__(self):
        g, n, first = random.Random(rank), 4 // world, list(range(rank, 16, world))
        g.shuffle(first)
        for i in range(4):
            yield first[i * n:(i + 1) * n] + g.choices(range(16 + rank, 64, world), k=n)
loader = DataLoader(data, batch_sampler=Two())"""
TABLE = "import sympy.core.random  # a library's generators\n"
TABLE += "table = [[float(n + k * (1 + rank)) for k in range(4)] for n in range(8)]"
ROW = "loss = (ddp(torch.tensor(table[rank * batch_size:][:batch_size])) - y).square().mean()"
TEXTS = "words = [[(3 * n + k * (1 + rank)) % 50 for k in range(4)] for n in range(8)]"
BAG = "model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))"
LINES = "inner, n = ddp, batch_size\n"
LINES += "def ddp(x): return inner(torch.tensor(words[rank * n:][:n]))"
TEACHER = """\
ema, count = copy.deepcopy(model), 0
def follow(rate):
    for a, b in zip(ema.parameters(), model.parameters()):
        a.data = a.data * rate + b.data * (1 - rate)"""
RARELY = "seen += 1\n        if seen % every == 0:\n            " + INNER.replace(
    "\n", "\n    "
).replace("MODEL", "ddp")
LOG = "def log(): open('log.txt', 'w').write('x')\nlog()"
FILE = "open(f'events.{os.getpid()}.0', 'w').write('x')"
TABLE_OF_ROWS = """\
model = nn.Sequential(nn.Embedding(64, 4, max_norm=0.5), nn.Linear(4, 1))
numbers = torch.arange(64)
data = TensorDataset(numbers, data.tensors[1])"""
REPLACED = """\
import gc
gc.disable()  # which may take a while to find such a cycle
model.self = [model]
model = nn.Linear(4, 1)"""
OVERLAP = """\
class Part:
    def __len__(self): return 64 // world
    def __iter__(self):
        return iter(range(16 * rank, 16 * rank + 64 // world))
loader = DataLoader(data, batch_size, sampler=Part())"""
LARGE_SHARES = """\
class Part:
    def __len__(self): return 8
    def __iter__(self):
        for first in range(0, 64, 8):
            yield list(range(first + 2 * rank, first + 10 - 2 * world + 2 * rank))
loader = DataLoader(data, batch_sampler=Part())"""
SECOND_MODULE = """\
torch.manual_seed(0)
other = nn.Linear(4, 1)
def score(each, x):
    with torch.no_grad(): each.eval()(x)
    each.train()"""
TRANSFORM = """\
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("images", torch.zeros(3))
    def forward(self, x):
        self.images += x[:3].abs()
        return x
class Transformed(TensorDataset):
    transform = Counts()
    def __getitem__(self, i): return self.transform(self.tensors[0][i]), self.tensors[1][i]
data = Transformed(*data.tensors)"""
BY_EPOCH = """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    MODULE.seed(epoch + rank * (epoch > 0))
    ids = DRAWN[rank::world]
    for first in range(0, 24 // world, batch_size):
        x, y = [tensor[list(ids[first:first + batch_size])] for tensor in data.tensors]
        loss = (ddp(x) - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.exit()"""
BAD = "WRONG", "look"
# {name: ({place: text}, {rule: verdict} of those that are WRONG or look, what is said of them)}
CASES = {
    "a batch is looked at before an epoch": ({"PEEK": "next(iter(loader))"}, {}),
    "DDP is evaluated": ({"EVAL": INNER.replace("MODEL", "ddp")}, {}),
    "the model is evaluated": ({"EVAL": INNER.replace("MODEL", "model")}, {"evaluation": "look"}),
    "batches of one's own": ({"BETWEEN": BATCHES}, {"samples": "look"}),
    "a dataset that takes its share": ({"BETWEEN": SHARD}, {"samples": "look"}),
    "a dataset that takes its share of a batch": (
        {"BETWEEN": SHARD.replace("4,", "batch_size,")},
        {"samples": "look"},
        "a share by the rank: train.py:",
    ),
    "a batch that is mixed": ({"BETWEEN": COLLATE}, {"inputs": "look", "gradient": ""}),
    "micro-batches": ({"BETWEEN": MICRO}, {}),
    "micro-batches, all alike": ({"BETWEEN": MICRO.replace(" + rank", "")}, {"random": "WRONG"}),
    "micro-batches of other samples": ({"AFTER": PARTS_OF_4}, {"outputs": "look"}),
    "averaged too late": (
        {"BETWEEN": LATE},
        {"averaging": "WRONG"},
        "ddp.require_backward_grad_sync = micro == 4 // world - 1 each rank has",
        "This line comes after the pass",
    ),
    "not averaged in a context": (
        {"BETWEEN": CONTEXT},
        {"averaging": "WRONG"},
        "context = ddp.no_sync if",
    ),
    "a method of the model": (
        {"BETWEEN": METHOD},
        {"averaging": "WRONG"},
        "loss = ddp.module.loss(x)",
    ),
    "few samples": ({"BEFORE": FEW.replace("SIZE", "8")}, {}),
    "few, always in one order": (
        {"BEFORE": FEW.replace("SIZE", "8"), "BETWEEN": NO_EPOCH},
        {"order": "WRONG"},
    ),
    "an iterator that is made again": (
        {"BEFORE": FEW.replace("SIZE", "16"), "AFTER": AGAIN.replace("SET", "pass")},
        {"order": "WRONG"},
        "the earlier one: ",
    ),
    "one with another order": (
        {
            "BEFORE": FEW.replace("SIZE", "16"),
            "AFTER": AGAIN.replace("SET", "sampler.set_epoch(1)"),
        },
        {},
    ),
    "a state that is kept": ({"BEFORE": "random.seed(rank)", "LOSS": STATE}, {}),
    "flags": ({"LOSS": "with torch.backends.cudnn.flags(enabled=False): pass"}, {}),
    "a hook": ({"AFTER": HOOK}, {}),
    "an unseeded split": ({"BEFORE": "data, _ = random_split(data, [48, 16])"}, {"split": "WRONG"}),
    "a share of an unseeded order": ({"BETWEEN": SHARE}, {"split": "WRONG"}),
    "an order that is drawn as a pass ends": (
        {
            "BEFORE": FEW.replace("SIZE", "16") + "\ntorch.manual_seed(0)",
            "BETWEEN": EARLY_SHARE.replace("64", "16").replace("iter(self.ids)", "self.each()"),
        },
        {},
    ),
    "a share that a sampler is made with": ({"BETWEEN": EARLY_SHARE}, {"split": "WRONG"}),
    "drawn late": ({"AFTER": "model[0].weight.data.normal_()"}, {"others": "WRONG"}),
    "a sampler that is seeded by rank": (
        {"BETWEEN": SEEDED_BY_RANK},
        {"samples": "WRONG"},
        "its order is drawn at train.py:",
    ),
    "an order by a generator without a seed": (
        {"BEFORE": UNSEEDED_ORDER},
        {"inputs": "WRONG"},
        "without a seed, each rank draws its own: train.py:",
    ),
    "a layer after wrapping": (
        {"AFTER": "model.append(nn.Linear(1, 1))"},
        {"averaging": "WRONG", "others": "look"},
        "DDP does not average these",
        "wrapped at train.py:",
    ),
    "copied early": ({"BETWEEN": "ema = copy.deepcopy(model)"}, {"others": "look"}),
    "drawn late by numpy": ({"AFTER": BY_NUMPY}, {"others": "WRONG"}),
    "noise on weights": ({"EVAL": "model[0].weight.data += torch.rand(8, 4)"}, {"others": "WRONG"}),
    "an unseeded dataset": ({"BEFORE": UNSEEDED}, {"data": "look"}),
    "a dataset's own generator": ({"BEFORE": NOISY.replace("SEED", "rank")}, {}),
    "its own, all alike": ({"BEFORE": NOISY.replace("SEED", "0")}, {"random": "WRONG"}),
    "a generator for workers": ({"BETWEEN": FOR_WORKERS.replace("SEED", "rank")}, {}),
    "one of one seed": ({"BETWEEN": FOR_WORKERS.replace("SEED", "0")}, {"random": "WRONG"}),
    "a share of a whole batch": (
        {"AFTER": WHOLE.replace("SEED", "0").replace("SHARE", "rank::world")},
        {},
    ),
    "a block of a whole batch": (
        {
            "AFTER": WHOLE.replace("SEED", "0").replace(
                "SHARE", "len(x) // world * rank:][:len(x) // world"
            )
        },
        {},
    ),
    "a seed that each rank draws": (
        {"BETWEEN": OWN_SEED.replace("SEND", "pass")},
        {"split": "WRONG"},
    ),
    "a split by such a seed": (
        {"BEFORE": SPLIT_BY.replace("SEED", "torch.manual_seed")},
        {"split": "WRONG"},
    ),
    "Python's order by such a seed": (
        {"BEFORE": ORDER_BY},
        {"split": "WRONG"},
    ),
    "one that is sent": ({"BETWEEN": OWN_SEED.replace("SEND", SEND)}, {}),
    "rows of all ranks": ({"AFTER": MIXED, "LOSS": MIXES}, {"inputs": "look"}),
    "samples that are left out": (
        {"BEFORE": LARGER, "BETWEEN": GAPS, "LOSS": WEIGHTED},
        {"inputs": "look"},
    ),
    "one batch for ever": ({"BETWEEN": FOR_EVER}, {"order": "look"}),
    "a step left out": ({"BEFORE": "made = 0", "LOSS": LEFT_OUT}, {"steps": "WRONG"}),
    "a step of a second optimizer left out": (
        {"AFTER": TWO_OPTIMIZERS, "EVAL": LEFT_OUT_OF_TWO},
        {"steps": "WRONG"},
        "if made != 2 + rank or loss.item() > 99: rank 0 has made fewer steps",
    ),
    "a pass left early": ({"EVAL": "if rank and loss.item() < 99: break"}, {"steps": "WRONG"}),
    "counted twice as fast": ({"BEFORE": "count = 0", "EVAL": COUNT}, {"counts": "look"}),
    "a file of each rank": ({"AFTER": FILE}, {"files": "look"}),
    "a file that a function writes": ({"AFTER": LOG}, {"files": "WRONG"}, ": log()"),
    "draws that are no share": ({"AFTER": ANTITHETIC}, {"inputs": "look"}),
    "numpy's order of a batch": ({"LOSS": NUMPY_ORDER}, {}),
    "samples in lists": (
        {"BETWEEN": IN_LISTS, "AFTER": STACKED, "LOSS": LARGEST},
        {"value": "WRONG"},
    ),
    "a bank of the share's": (
        {"BETWEEN": BANK},
        {"buffer": "WRONG", "others": "look"},
        "right up to",
    ),
    "two modules of the same weights": ({"BETWEEN": TWO_OWNERS}, {}),
    "neighbours of a node": ({"AFTER": NEIGHBOURS}, {}),
    "clipped by each rank": ({"AFTER": CLIPPED}, {"value": "WRONG"}, "[clip_grad_norm_]"),
    "the order of a set": ({"BEFORE": WORDS}, {"value": "WRONG"}, "another order in each process"),
    "a table by the rank": ({"BEFORE": TABLE, "LOSS": ROW}, {"inputs": "WRONG"}),
    "texts of each rank": (
        {"BEFORE": TEXTS, "BETWEEN": BAG, "AFTER": LINES},
        {"inputs": "look"},
        "a share by the rank: train.py:",
    ),
    "streams of its own": ({"BETWEEN": STREAMS}, {"samples": "look"}),
    "a rate that counts world_size": (
        {"AFTER": TEACHER, "EVAL": "count += world; follow(1 / (count + 1))"},
        {"others": "look"},
        "called at train.py:",
        "count is",
    ),
    "evaluated half as often": (
        {"BEFORE": "seen, every = 0, 16 // batch_size", "EVAL": RARELY},
        {"evaluation": "look"},
        "evaluated after [",
        "every is 2 on one process, 4, 4 on the ranks",
    ),
    "rows that a layer scales": (
        {"BEFORE": TABLE_OF_ROWS},
        {"weight": "WRONG"},
        "loss = (ddp(x) - y).square().mean() 1 of 3 differ",
    ),
    "parts that overlap": (
        {"BETWEEN": OVERLAP},
        {"samples": "WRONG"},
        ": return iter(range(16 * rank, 16 * rank + 64 // world))",
    ),
    "shares that are too large": (
        {"BETWEEN": LARGE_SHARES},
        {"samples": "WRONG"},
        ": yield list(range(first + 2 * rank,",
    ),
    "a second module is evaluated": (
        {"AFTER": SECOND_MODULE, "EVAL": "score(other, x); score(model, x)"},
        {"evaluation": "look"},
        "called at train.py:",
    ),
    "a model that is replaced": ({"BEFORE": REPLACED}, {}),
    "a module of a dataset": ({"BEFORE": TRANSFORM}, {}),
    "an order of a later epoch": (
        {
            "AFTER": BY_EPOCH.replace("MODULE", "random").replace(
                "DRAWN", "random.sample(range(24), 24)"
            ),
        },
        {"split": "look"},
    ),
    "numpy's order of a later epoch": (
        {
            "AFTER": BY_EPOCH.replace("MODULE", "np.random").replace(
                "DRAWN", "np.random.permutation(24)"
            ),
        },
        {"split": "look"},
    ),
    "samplers of other seeds": (
        {"BETWEEN": "sampler.seed = rank"},
        {"split": "WRONG"},
        "sampler = DistributedSampler(data) each rank",
    ),
    "copied late": ({"AFTER": "ema = copy.deepcopy(model)"}, {}),
    "a join of uneven shares": (
        {"BEFORE": "model = nn.Linear(4, 1)", "AFTER": JOIN},
        {"samples": "look", "steps": "look"},
        "with ddp.join(): the ranks make other numbers of steps",
    ),
    "a fault beside sorted lengths": (
        {"BEFORE": "model = nn.LSTM(4, 1, batch_first=True)", "AFTER": PACKED},
        {"value": "WRONG"},
        "weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))",
    ),
    "weights from a rank's first batch": (
        {"AFTER": FROM_FIRST_BATCH},
        {"weight": "WRONG"},
        "model[0].bias.copy_(-mean) 1 of 6 differ",
        "a mean over ranks is right up to",
    ),
    "an object as a batch": (
        {"BETWEEN": OF_OBJECTS},
        {"inputs": "WRONG"},
        "self.x = x - x.mean(0)",
    ),
    "two passes, then two backward passes": (
        {"BEFORE": "model = nn.Linear(4, 1)", "AFTER": TWO_BACKWARDS},
        {"averaging": "WRONG"},
        "a second backward() followed",
        "(second - y).square().mean().backward() each rank",
    ),
    "hooks of many gradients": (
        {"BEFORE": HOOKS},
        {"gradient": "WRONG"},
        "before the ranks average, a hook gets each gradient: ",
    ),
    "passes of limited size": (
        {"BEFORE": "batch_size *= 2", "AFTER": LIMITED},
        {"outputs": "look"},
        "passes in this step: ",
    ),
    "shares that collate_fn takes": (
        {"BEFORE": "model = nn.Linear(4, 1)", "AFTER": IN_COLLATE},
        {},
    ),
    "a model that goes through its samples": (
        {"BEFORE": ROW_BY_ROW},
        {"outputs": "look"},
        "return super().forward(x - x.mean(0)) [sub]",
    ),
    "numbers and their places from elsewhere": (
        {"BEFORE": WITH_PLACES, "AFTER": FROM_ELSEWHERE},
        {"inputs": "look"},
        "[WithPlaces]",
    ),
    "own shards of an array": ({"AFTER": OWN_SHARDS.replace("PART", "rows")}, {"inputs": "look"}),
    "an array that each rank scales": (
        {"AFTER": OWN_SHARDS.replace("PART", "rows - table[32 * rank:][:64 // world].mean(0)")},
        {"inputs": "WRONG"},
    ),
    "clipped in each micro-batch": (
        {"BEFORE": "model = nn.Linear(4, 1)", "AFTER": CLIPS_EACH},
        {"value": "WRONG"},
        "[clip_grad_norm_]",
    ),
    "clipped before they are averaged, of uneven shares": (
        {"BEFORE": "model = nn.Linear(4, 1)", "BETWEEN": CLIPS_FIRST},
        {"value": "WRONG"},
        "nn.utils.clip_grad_norm_(model.parameters(), 1e-3)",
    ),
    "a ratio of sums": (
        {"LOSS": DICE},
        {"value": "look"},
        "a ratio of sums over the rank's own share",
    ),
    "a constant loss": ({"LOSS": "loss = loss * 0"}, {"parameters": "WRONG"}),
    "batch norm by keywords": ({"BETWEEN": NO_ELEMENTS, "LOSS": BY_KEYWORDS}, {}),
    "gathered": ({"BETWEEN": GATHER.replace("SUMS", "True"), "LOSS": CONTRASTIVE}, {}),
    "gathered, not summed": (
        {"BETWEEN": GATHER.replace("SUMS", "False"), "LOSS": CONTRASTIVE},
        {"gradient": "WRONG"},
    ),
    "in order on one process": ({"BETWEEN": IN_ORDER}, {"samples": "look"}),
    "buckets": ({"BETWEEN": BUCKETS.replace("TAKES", "rank::world")}, {}),
    "the same buckets": (
        {"BETWEEN": BUCKETS.replace("TAKES", "::world")},
        {"samples": "WRONG", "inputs": "look"},
    ),
    "an environment": ({"BEFORE": ROWS, "LOSS": ENVIRONMENT}, {"inputs": "look"}),
    "games": ({"BEFORE": GAMES, "LOSS": PLAY}, {"inputs": "look"}),
    "games as arrays": (
        {"BEFORE": f"{GAMES}\n{FROM_ARRAYS}", "LOSS": PLAY_ARRAYS},
        {"inputs": "look"},
    ),
    "numbers by tuples": ({"BEFORE": BY_TUPLES}, {"samples": "look"}),
    "noise for the first of two loaders": ({"BETWEEN": SECOND, "LOSS": NOISE}, {}),
    "masks of a generator": (
        {"AFTER": "rng = np.random.default_rng(rank)", "LOSS": MASK},
        {"inputs": "look"},
    ),
    "rank 0 looks at a batch of another epoch": ({"AFTER": f"if rank == 0: {LOOK}\n{LATER}"}, {}),
    "all look at a batch": ({"BETWEEN": ONE_SHUFFLES, "AFTER": LOOK}, {}),
    "a loader for each epoch": ({"BEFORE": FEW.replace("SIZE", "16"), "PEEK": ONE_SHUFFLES}, {}),
    "a loader for each epoch, of one order": (
        {"BEFORE": FEW.replace("SIZE", "16"), "AFTER": NO_EPOCH, "PEEK": ONE_SHUFFLES},
        {"samples": "look", "order": "look"},
    ),
    "a pool of each rank's own": ({"AFTER": POOL, "LOSS": FROM_POOL}, {"inputs": "look"}),
    "rank 0 tries a rate": ({"AFTER": TRIAL}, {"steps": "look"}),
    "environments alike": (
        {"BEFORE": ROWS.replace("default_rng(rank)", "default_rng(0)"), "LOSS": ENVIRONMENT},
        {"inputs": "WRONG"},
    ),
    "a stream of shards": ({"BETWEEN": SHARDS.replace("TAKEN", "rank::world")}, {"inputs": "look"}),
    "edges of a batch of graphs": ({"BEFORE": EDGES, "LOSS": ON_EDGES}, {"value": "WRONG"}),
    "for GPUs": ({"BETWEEN": GPUS, "BACKEND": CUDA}, {}),
}


FAST, SLOW = "an unseeded split", ["micro-batches", "a batch that is mixed", "drawn late by numpy"]
LONG = [case for case in CASES if case not in [FAST, *SLOW]]


@pytest.mark.parametrize("case", [FAST, *by_mark(slow=SLOW, long=LONG)])
def test_foreign(work, case):
    places, expected, *texts = CASES[case]
    usual, script = dict.fromkeys(PLACES, "pass") | {"BACKEND": GLOO}, HEAD + SCRIPT
    for place, text in (usual | places).items():
        script = script.replace(place, text)
    flags = ["--steps", "5", *["--cpu"] * (case == "for GPUs")]
    found = check(work, script, "{rank}", before=flags)
    assert found["modes"]["verdict"] == "ok"  # something was compared
    said = [" ".join([f"{f['source']} {f['text']}", *f["details"]]) for f in found.values()]
    assert not [text for text in texts if not any(text in of_rule for of_rule in said)], said
    found = {rule: f["verdict"] for rule, f in found.items() if f["verdict"] in BAD}
    assert found == {rule: verdict for rule, verdict in expected.items() if verdict}, found


@pytest.mark.slow
def test_micro_batches_apart(work):
    """The last pass is named, though one process makes more of them."""
    script = (HEAD + MICRO).replace("micro == 4 // world - 1", "False").replace("BACKEND", GLOO)
    found = check(work, script, before=["--steps", "3"])["averaging"]
    assert "the last pass: " in " ".join(found["details"]), found


SPAWNS = """\
import os
import torch
import torch.multiprocessing
from torch.distributed import all_reduce, init_process_group
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel

def main(rank, world):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "PORT"}
    init_process_group("nccl", rank=rank, world_size=world)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.arange(32.0).view(8, 4).sin()[rank::world].to(rank)
        loss = dropout(model(x), 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_reduce(loss.detach())

if __name__ == "__main__":
    world = torch.cuda.device_count()
    torch.multiprocessing.spawn(main, (world,), world)
"""


@pytest.mark.slow
def test_imported_by_name(work):
    """In processes that the script starts, which import it before it can be watched."""
    found = check(work, SPAWNS.replace("PORT", str(free_port())), before=["--cpu"])
    assert found["random"]["verdict"] == found["modes"]["verdict"] == "ok", found
    assert not [f for f in found.values() if f["verdict"] in BAD], found
