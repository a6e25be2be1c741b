"""Scripts that cannot be compared, and are told so before their first step."""

import torch
import torch.distributed as dist

from ..imports import when_imported
from ..patches import stop_both_runs, wrap
from ..script import place, source

JOIN = "a script for one process? What it needs for several: docs/your_loop.md#the-checklist"


def refuse_alone(run):
    """Processes that each train for themselves, as those of a script for one do."""
    if run.is_single:
        return
    if not dist.is_initialized():
        text = f"its {run.world} processes have not joined: no init_process_group()"
        facts = {"line": source(place()[0]), "text": text, "remedy": JOIN}
        stop_both_runs(run.folder, "refused", facts)
    elif dist.get_world_size() != run.world:
        text = f"a process group of {dist.get_world_size()}, not of {run.world}"
        remedy = "take rank and size from RANK and WORLD_SIZE, or from flags, as {rank} and {n}"
        facts = {"line": source(place()[0]), "text": text, "remedy": remedy}
        stop_both_runs(run.folder, "refused", facts)


def refuse_graphs(run):
    """A CUDA graph runs again without Python, so that nothing of it could be noted; and copies to
    the CPU would make its recording fail."""

    @wrap(torch.cuda.CUDAGraph, "__new__")
    def make(original, cls, *args, **kwargs):
        facts = {"line": source(place()[0]), "text": "not compared: CUDA graphs"}
        stop_both_runs(run.folder, "refused", facts | {"remedy": "run it without them"})


def refuse_parts(run):
    """A model whose layers, or whose stages, are on other ranks: these share each batch."""

    def refuse(what):
        facts = {"line": source(place()[0]), "text": f"not compared: {what}"}
        facts["remedy"] = "run it with data parallelism alone, a size of 1 for what shares a batch"
        stop_both_runs(run.folder, "refused", facts)

    def refuse_layers(module):
        @wrap(module, "parallelize_module")
        def parallelize(original, layer, device_mesh=None, *args, **kwargs):
            if (device_mesh or dist.group.WORLD).size() > 1:
                refuse("tensor parallelism")
            return original(layer, device_mesh, *args, **kwargs)

    def refuse_stages(module):
        @wrap(module.PipelineStage, "__init__")
        def make(original, self, submodule, stage_index, num_stages, *args, **kwargs):
            if num_stages > 1:
                refuse("pipeline parallelism")
            original(self, submodule, stage_index, num_stages, *args, **kwargs)

    when_imported("torch.distributed.tensor.parallel", refuse_layers)
    when_imported("torch.distributed.pipelining", refuse_stages)
