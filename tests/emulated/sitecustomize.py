"""Python runs this as it starts, with this folder in PYTHONPATH: EMULATED_CARDS=2 python ..."""

import os
import sys

if os.environ.get("EMULATED_CARDS") and "resource_tracker" not in " ".join(sys.orig_argv):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    __import__("emulated_accelerator").install(int(os.environ["EMULATED_CARDS"]))
