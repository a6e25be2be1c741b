"""A process that outlives ddp_check, however that ends: by its end, Ctrl-C, or kill -9."""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from .made import remove_made


def stop_groups(groups):
    """End processes, and what they have started, which is in the same group."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def wait_for_end(groups):
    """Until they write no more; those that nobody waits for stay as numbers only."""
    for _ in range(60):
        for group in list(groups):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                groups.remove(group)
        if not groups:
            return
        time.sleep(0.05)


class Janitor:
    """Stops what still runs, removes what the script has created, and the folder of notes. What
    runs has a file NAME.pid there."""

    def __init__(self, folder):
        read, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # Ctrl-C in the terminal is not for it
                os.close(self.pipe)
                self.clean_up(folder, read)
            finally:
                os._exit(0)
        os.close(read)

    def finish(self):
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    @staticmethod
    def clean_up(folder, pipe):
        os.read(pipe, 1)  # until ddp_check has ended, and the system closes its end
        texts = [file.read_text() for file in Path(folder).glob("*.pid")]
        groups = [int(text) for text in texts if text]
        stop_groups(groups)
        wait_for_end(groups)
        for text in remove_made(folder):
            print(f"ddp_check: {text}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
