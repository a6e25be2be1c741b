"""Runs a training script on one process, then on N, and says where they part.

In all processes:

script     the script's files and lines, and how it is run
text       what stands in them: statements, names, branches
patterns   lines that share, divide, put in order, compare, or read flags
notes      what is noted, as dataclasses; written in each process, read when all have ended
sketch     what is noted of a tensor
imports    functions that are called when a module is imported

In those of a run:

patches    functions that are replaced
places     where a rank's samples are among those of one process
process    what the process knows, and the notes that it takes
gpus       what it is told of GPUs that are not there
cpu        scripts for GPUs, on CPUs
given/     what the script gets: random numbers, samples, batch norm
seen/      what it does: values of lines, steps, numbers
kept/      what is its user's, and stays as it is: files (made: also in the command)
child      the script, watched, from its first line to its last

In the command:

progress   what is said of a run while it lasts; why it has ended
runs       starts the processes of a run, waits for them, and ends them
pairs      which runs it takes, and with which options
compare/   where the ranks' notes are not those of one process, rules, causes, the report
launchers  torchrun and others in front of the script
command    the flags; the runs, the report

__main__   starts command, or in each process of a run, child

A room imports those above it in this list alone.
"""

__version__ = "5.0"  # pyproject.toml takes it from here
