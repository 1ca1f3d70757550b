"""The matrix groups, which compose: each says which form Q has and how it learns."""

from .bordered import Bordered
from .combinator import Combinator
from .diagonal import Diagonal, Equilibration
from .direct_sum import DirectSum
from .kron import Kron
from .normalization import Normalization
from .protocol import Group
from .sparse_lu import SparseLU
from .triangular import Triangular

__all__ = [
    "Bordered",
    "Combinator",
    "Diagonal",
    "DirectSum",
    "Equilibration",
    "Group",
    "Kron",
    "Normalization",
    "SparseLU",
    "Triangular",
]
