"""Runs a training script on one process, then on N, and says where they part.

__main__   starts command, or in each process of a run, child
command    the flags; both runs, the report
launchers  torchrun and others in front of the script
runs       starts the processes of a run, waits for them, and ends them
child      in each: the script, watched, from its first line to its last
process    what the process knows, and the notes that it takes
script     the script's files and lines, and the names in them
gpus       what it is told of GPUs that are not there
cpu        scripts for GPUs, on CPUs
notes      what is noted, as dataclasses; written in each process, read when all have ended
sketch     what is noted of a tensor
given/     what the script gets: random numbers, samples, batch norm
seen/      what it does: values of lines, steps, numbers
kept/      what is its user's, and stays as it is: files
compare/   where the ranks' notes are not those of one process, rules, causes, the report

In the script's processes: child, process, gpus, cpu, given/, seen/, kept/files; elsewhere, the
others. A room imports those above it in this list, and seen/ also given/; nothing else.
"""

__version__ = "4.0"  # pyproject.toml takes it from here
