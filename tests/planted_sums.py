"""Sums whose order is known, because it is written here: random trees, and float32 additions in their order.

Nothing here uses detlab: it is what recovered trees are held against.
"""

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

Nodes = list[tuple[int, ...]]


def random_nodes(n: int, seed: int, widest: int = 2) -> Nodes:
    """A random tree over n terms: children by id, children before parents; nodes have 2 to ``widest`` of them.

    Some are balanced, some are chains: two subtrees are drawn either from everywhere or near the last one made.
    """
    choose = random.Random(seed)
    is_chain = choose.random() < 0.3
    loose, nodes = list(range(n)), []
    while len(loose) > 1:
        count = min(len(loose), choose.randint(2, widest))
        taken = [loose.pop(-1 if is_chain and i == 0 else choose.randrange(len(loose))) for i in range(count)]
        nodes.append(tuple(taken))
        loose.append(n + len(nodes) - 1)
    return nodes


def add_in_order(nodes: Nodes, terms: Any, window: int = 24) -> float:
    """Adds float32 terms in the order of the nodes.

    A node of more than two children adds as hardware does that adds several terms at once: what lies below ``window`` bits
    under the largest term is cut off, the rest is added exactly and rounded once.
    """
    values = [np.float32(value) for value in terms]
    for children in nodes:
        if len(children) == 2:
            with np.errstate(over="ignore"):
                values.append(values[children[0]] + values[children[1]])
            continue
        parts = [float(values[child]) for child in children]
        top = max(map(abs, parts))
        step = 2.0 ** (math.frexp(top)[1] - window) if top else 1.0
        values.append(np.float32(math.fsum(math.trunc(part / step) * step for part in parts)))
    return float(values[-1]) if values else 0.0


def planted(nodes: Nodes) -> Any:
    """A function of a tensor of terms that adds them in the order of the nodes."""

    def planted_sum(terms: Tensor) -> Tensor:
        return torch.tensor(add_in_order(nodes, terms.tolist()), dtype=torch.float32)

    return planted_sum


def bottom_up(parts: Tensor, order: list[int]) -> Tensor:
    """Adds rows [num_parts, length]: each row one term after another, then the sums of the rows in the order given."""
    sums = []
    for row in parts:
        total = row[0]
        for term in row[1:]:
            total = total + term
        sums.append(total)
    total = sums[order[0]]
    for at in order[1:]:
        total = total + sums[at]
    return total
