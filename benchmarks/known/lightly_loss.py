"""What the files of lightly's losses have in common."""

import shutil
from pathlib import Path

NAME = "lightly-ai/lightly"
PATHS = ["lightly"]
PACKAGES = ["requests", "tqdm", "pydantic", "python-dateutil", "urllib3", "lightly_utils"]
ENVIRONMENT = {"LIGHTLY_DID_VERSION_CHECK": "True"}
LOOP = Path(__file__).parent / "loops" / "two_views.py"


def copy_loop():
    shutil.copy(LOOP, ".")
