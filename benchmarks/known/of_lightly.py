"""What the files of lightly's losses have in common."""

NAME = "lightly-ai/lightly"
FILES = ["lightly"]
NEEDS = ["requests", "tqdm", "pydantic", "python-dateutil", "urllib3", "lightly_utils"]
NO_REQUESTS = {"LIGHTLY_DID_VERSION_CHECK": "True"}
