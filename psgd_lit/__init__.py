"""Preconditioned stochastic gradient descent: a book that is also a torch library."""

__version__ = "0.1.0"
