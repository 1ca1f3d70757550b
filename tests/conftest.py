"""Put the book's own tools on the path: the gates judge a notebook with the code that writes it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nbs" / "_ext"))
