"""Stand for a kernel that a `KernelServer` forks: ask it for one, end with it, and end it.

Usage: `python ask.py CONNECTION_FILE`, with the address of the server in `PSGD_LIT_KERNELS`.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def main(connection_file: str) -> None:
    """Ask for a kernel, pass interrupts on to it, and wait until its end closes the connection."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["PSGD_LIT_KERNELS"])
        line.sendall(json.dumps([connection_file, str(Path.cwd())]).encode() + b"\n")
        kernel = int(line.recv(32))
        signal.signal(signal.SIGINT, lambda *_: os.kill(kernel, signal.SIGINT))
        line.recv(1)


if __name__ == "__main__":
    main(sys.argv[1])
