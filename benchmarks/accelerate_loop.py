"""The same training through Hugging Face Accelerate, as its quick tour has it."""

import os

import torch
from accelerate import Accelerator
from common import Clock, cifar10, model, parser
from torch.nn import functional as F
from torch.utils.data import DataLoader

if __name__ == "__main__":
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    train_set, net = cifar10(args), model(args)
    batch = args.batch_size // accelerator.num_processes
    loader = DataLoader(train_set, batch_size=batch, shuffle=True, num_workers=args.workers)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    clock = Clock(len(train_set))
    net.train()
    for _ in range(args.epochs):
        clock.start()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.is_main_process:
                clock.step()
        if accelerator.is_main_process:
            clock.stop()
    accelerator.end_training()
    os._exit(0)  # Gloo's threads sometimes abort a process that ends by itself
