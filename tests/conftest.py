"""The book's own tools on the path, since the gates judge a notebook with the code that writes it."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nbs" / "_ext"))

# How long an example takes says something of the machine alone; `make test` tries a few examples, `make check` all.
settings.register_profile("all", deadline=None)
settings.register_profile("few", deadline=None, max_examples=4)
settings.load_profile("all")
