"""Preconditioned stochastic gradient descent: a book that is also a torch library."""

from .affine import affine_blocks
from .diagnosis import doctor
from .lbfgs import PreconditionedLBFGS
from .optim import PSGD
from .settings import PAPER

__version__ = "0.1.0"
__all__ = ["PAPER", "PSGD", "PreconditionedLBFGS", "__version__", "affine_blocks", "doctor"]
