"""Kernels that start at once: one process imports what most chapters import, and each kernel is a fork of it.

Each notebook still has a process of its own, in which nothing of another notebook and nothing of the library is.
Jupyter knows such kernels by the name `forked` (`nbs/_ext/kernels`), and `serving` makes them available.
Usage: `python nbs/_ext/kernel_server.py ADDRESS`, which serves until its standard input is closed.
"""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

ADDRESS = "PSGD_LIT_KERNELS"
"""The environment variable that tells kernels where the server is."""
KERNELS = Path(__file__).with_name("kernels")
IMPORTED = ("torch", "torch._dynamo", "matplotlib_inline.backend_inline", "matplotlib.pyplot", "ipykernel.kernelapp")
"""Modules that are imported once for all kernels; none is of this library."""


@contextmanager
def serving() -> Iterator[None]:
    """Make kernels of the name `forked` known and available to this process and to those that it starts.

    Raises:
        RuntimeError: if the server ends before it serves.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        command = [sys.executable, __file__, address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as server:
            if server.stdout is None or server.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the server of kernels ended with {server.wait()} before it served")
            before = dict(os.environ)
            paths = [str(KERNELS.parent), *filter(None, [before.get("JUPYTER_PATH")])]
            os.environ |= {ADDRESS: address, "JUPYTER_PATH": os.pathsep.join(paths)}
            try:
                yield
            finally:
                os.environ.clear()
                os.environ.update(before)


class KernelServer:
    """Listens at a Unix socket, and forks a kernel for each connection."""

    def __init__(self, address: str) -> None:
        """Listen before any import, so that nobody finds the door closed."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(address)
        self.socket.listen()

    def serve(self) -> None:
        """Fork kernels until standard input is closed; then wait for those that are left."""
        while True:
            ready, _, _ = select.select([self.socket, sys.stdin], [], [])
            if sys.stdin in ready:
                break
            line, _ = self.socket.accept()
            if os.fork() == 0:
                self.socket.close()
                become_kernel(line)
            line.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        with suppress(ChildProcessError):
            while True:
                os.wait()


def become_kernel(line: socket.socket) -> NoReturn:
    """Tell the number of this process, go to the folder that is asked for, and be a kernel until either side ends."""
    connection_file, folder = json.loads(line.makefile().readline())
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    draw_afresh()
    line.sendall(str(os.getpid()).encode())
    threading.Thread(target=end_with, args=[line], daemon=True).start()
    sys.argv = ["ipykernel_launcher", "-f", connection_file]
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()
    os._exit(0)


def draw_afresh() -> None:
    """Seed the generators that a fork inherits, as a new process would, from the system's randomness."""
    import numpy
    import torch

    numpy.random.seed()
    torch.seed()


def end_with(line: socket.socket) -> None:
    """End this process when the one that asked for it has ended."""
    line.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main(address: str) -> None:
    """Import, say so, and serve."""
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    server = KernelServer(address)
    for name in IMPORTED:
        importlib.import_module(name)
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    del sys.path[0]
    main(sys.argv[1])
