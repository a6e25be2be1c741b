"""Loaders that a framework makes of the script's, so that each rank gets its share: they keep the
names of these, and give one process the batches of all ranks."""

import copy

from ..notes import Cut
from ..script import library_place


def prepared_name(run, dataset):
    """That of the script's loader of this dataset; "" if there is none, or if the script itself is
    making it."""
    if type(dataset).__name__ == "IterableDatasetShard":  # Accelerate's
        dataset = dataset.dataset
    names = run.loaders.get(id(dataset), [])
    if not names or not library_place():
        return ""
    return names[run.nth("prepared", id(dataset)) % len(names)]


def batch_of_all(run, name, batch_size, kwargs):
    """The batch size and further arguments of a DataLoader, with batches of all ranks' size on one
    process."""
    if not run.is_single or not run.options["prepared"]:
        return batch_size, kwargs
    batches = kwargs.get("batch_sampler")
    if batches is None and batch_size:  # None: the dataset's own batches
        batch_size *= run.world
        run.note(Cut(name, batch_size))
    elif hasattr(batches, "batch_size") and not is_of_all(batches):
        batches = copy.copy(batches)
        batches.batch_size *= run.world
        batches.check_is_of_all = True
        run.note(Cut(name, batches.batch_size))
        kwargs = kwargs | {"batch_sampler": batches}
    return batch_size, kwargs


def is_of_all(batches):
    """Whether it, or one that it is made of, as where batches are skipped, already gives them."""
    while batches is not None:
        if getattr(batches, "check_is_of_all", False):
            return True
        batches = getattr(batches, "batch_sampler", None)
    return False
