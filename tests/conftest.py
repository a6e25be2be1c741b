"""Hides the GPUs of this machine before the tests, or what they import, can count them. So nothing
here imports torch: the fixtures are in all_fixtures.py."""

import os
import signal
from multiprocessing import forkserver


def pytest_configure(config):
    """What is set here also holds in all processes that this one starts."""
    chosen = config.option.markexpr  # of -m
    if "gpu" not in chosen or "not gpu" in chosen:
        # To HIP, "" is all.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of several processes fight for the cores
    # A shell lets what it starts by `&` ignore Ctrl-C, and what that starts, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # It writes a line in pieces, between which another process's may come.
    os.environ.pop("PYTHONUNBUFFERED", None)
    config.pluginmanager.import_plugin("all_fixtures")


def pytest_collection_finish(session):
    forkserver.ensure_running()
