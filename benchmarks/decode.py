"""The limit for a folder of images: what PIL decodes with the scripts' number of workers."""

from common import Clock, load_data, parser
from torch.utils.data import DataLoader

if __name__ == "__main__":
    args = parser.parse_args()
    train_set, _ = load_data(args, "cpu")
    options = dict(num_workers=args.workers, persistent_workers=True)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, **options)
    clock = Clock(len(train_set))
    for _ in range(args.epochs):
        clock.start()
        for _ in loader:
            clock.step()
        clock.stop()
