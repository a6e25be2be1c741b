"""The same training through Lightning, as its introduction has it.

Its logger, progress bar, checkpoints and summary are off: the rest costs as much as it can't avoid.
"""

import os

import lightning
import torch
from common import Clock, cifar10, model, parser
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.net, self.lr = model(args), args.lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Times(lightning.Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_train_epoch_start(self, trainer, *args):
        self.clock.start()

    def on_train_batch_end(self, trainer, *args):
        if trainer.is_global_zero:
            self.clock.step()

    def on_train_epoch_end(self, trainer, *args):
        if trainer.is_global_zero:
            self.clock.stop()


if __name__ == "__main__":
    args = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    train_set = cifar10(args)
    batch = args.batch_size // processes
    loader = DataLoader(train_set, batch_size=batch, shuffle=True, num_workers=args.workers)
    off = "logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        callbacks=[Times(Clock(len(train_set)))],
        **dict.fromkeys(off, False),
    )
    trainer.fit(Classifier(args), loader)
    os._exit(0)  # Gloo's threads sometimes abort a process that ends by itself
