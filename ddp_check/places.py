"""Where a rank's samples are among those of one process."""

import torch


class Places:
    """Of a Process, by what it knows of its batches."""

    @property
    def loader_rows(self):
        return [rows for rows, _ in self.loaded.values()][-1] if self.loaded else None

    def positions(self, rank, size, own=False):
        """Where a rank's `size` entries of a dimension are among those of one process. A sample may
        have several. `own`: this rank's, whose batches may have another order."""
        ranks = self.world if self.is_single else 1
        orders = {(rows or 0) // ranks: order for rows, order in self.loaded.values()}
        parts = [n // ranks for n in self.joined.get(size * ranks, ())]
        if size not in orders and len(set(parts)) > 1:
            starts = [sum(parts[:i]) * self.world for i in range(len(parts))]
            return torch.cat([self.positions(rank, n, own) + at for n, at in zip(parts, starts)])
        loader_rows, model_rows = [(n or 0) // ranks for n in (self.loader_rows, self.model_rows)]
        batch = size if size in orders else loader_rows or model_rows or size
        if model_rows and size % batch:
            batch = model_rows
        if size < batch or size % batch:
            batch = size
        rows = torch.arange(rank, batch * self.world, self.world)
        order = orders.get(batch) if own else None
        if order is not None:
            rows = torch.tensor(order)
        else:
            self.by_layout = True
            if self.options["layout"] == "blocks":
                rows = torch.arange(rank * batch, (rank + 1) * batch)
        times = size // max(batch, 1)
        # Several views of the batch, one after the other.
        if parts or (size == model_rows and size * ranks not in self.joined):
            return torch.cat([rows + view * batch * self.world for view in range(times)])
        return (rows[:, None] * times + torch.arange(times)).reshape(-1)

    def shared_dimension(self, shape_of_one, shape):
        """The dimension of which a rank has its share of one process's; None if there is none. The
        others may be shorter, where a batch is padded to its longest sample."""
        both = list(zip(shape_of_one, shape))
        if len(shape_of_one) != len(shape) or any(one < own for one, own in both):
            return None
        return next((d for d, (one, own) in enumerate(both) if one == self.world * own), None)

    def share_of(self, values, shape):
        """This rank's part of one process's random numbers."""
        d = self.shared_dimension(values.shape, shape)
        values = values.index_select(d, self.positions(self.rank, shape[d], True))
        return values[tuple(slice(n) for n in shape)]

    def by_share(self, tensor, function):
        """On one process: what `function` makes of the rows of each rank, as rows of the batch."""
        ranks = range(self.world)
        places = [self.positions(rank, len(tensor) // self.world) for rank in ranks]
        with self.quiet():
            outputs = [function(rank, tensor[at]) for rank, at in zip(ranks, places)]
            return torch.cat(outputs)[torch.cat(places).argsort()]
