"""The accumulation tree: which terms a sum adds together first. Data only; nothing here runs an op.

A tree over ``n`` terms has the leaves ``0 .. n-1``, one for each term, and inner nodes that add their children. Floating-point
addition commutes and does not associate, so two trees are equal when they are the same up to an exchange of children.

Trees are kept in one canonical form: children in the order of their first term, nodes in post-order. Nothing here is recursive
over the depth, since a sum of thousands of terms one after another is as deep as it is long.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from detlab.divergence.accumulation_replay import NONE, ROUNDED, Arithmetic, evaluate
from detlab.divergence.accumulation_words import describe, outline
from detlab.errors import UsageError

Nodes = tuple[tuple[int, ...], ...]


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 0 (and no bool, which Python takes for one)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, eq=False)
class AccumulationTree:
    """The order in which an op adds its terms.

    Two trees are equal, and have one hash and one signature, when they hold the same sums up to an exchange of children; what
    the tree was recovered from and how it was replayed do not count. **Equal trees do not imply equal bits**: products may be
    rounded or fused, and the accumulator may be wider. `arithmetic` says which of these reproduced the op.

    Attributes:
        n: number of terms.
        nodes: children of each inner node; ids below ``n`` are terms, ``n + k`` is ``nodes[k]``. Children come before their
            parent, and the last node is the root.
        op: the call that was probed, in words; "" for a tree that was made by hand.
        arithmetic: how sums and products are rounded; None while nothing has been replayed.
        reproduced, trials: on how many random inputs the replayed tree gave the op's bits, of how many.
        control: on how many of them the same tree with its terms in other places did, which should be fewer; None where
            every such tree is this one.
        queries: calls that the recovery made.
    """

    n: int
    nodes: Nodes
    op: str = ""
    arithmetic: Arithmetic | None = field(default=None, repr=False)
    reproduced: int = 0
    trials: int = 0
    control: int | None = None
    queries: int = field(default=0, repr=False)

    @classmethod
    def from_nodes(cls, n: int, nodes: Sequence[Sequence[int]], **details: Any) -> AccumulationTree:
        """Makes a tree from nodes in any order in which children come before their parents.

        >>> AccumulationTree.from_nodes(3, [(2, 1), (3, 0)]) == AccumulationTree.from_nested((0, (1, 2)))
        True

        Raises:
            UsageError: the nodes are no tree over the ``n`` terms.
        """
        return cls(n, _canonical(n, nodes), **details)

    @classmethod
    def from_nested(cls, nested: Any, **details: Any) -> AccumulationTree:
        """Makes a tree from nested tuples: ``((0, 1), 2)`` adds the first two terms, then the third.

        Raises:
            UsageError: the terms are not ``0 .. n-1``, each once.
        """
        order: list[Any] = []
        stack = [nested]
        while stack:
            item = stack.pop()
            order.append(item)
            if not isinstance(item, int):
                stack.extend(item)
        n = sum(isinstance(item, int) for item in order)
        ids: list[int] = []  # of items seen, last first: children lie on top when their parent comes
        nodes: list[tuple[int, ...]] = []
        for item in reversed(order):
            if isinstance(item, int):
                ids.append(item)
                continue
            children = tuple(ids.pop() for _ in item)
            nodes.append(children)
            ids.append(n + len(nodes) - 1)
        return cls.from_nodes(n, nodes, **details)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AccumulationTree:
        """Reads what `to_json` wrote; a signature that does not fit the nodes is refused.

        Raises:
            UsageError: the data are no tree, or another tree than they say.
        """
        arithmetic = data.get("arithmetic")
        try:
            tree = cls.from_nodes(
                data["n"], data["nodes"], op=data.get("op", ""), reproduced=data.get("reproduced", 0),
                trials=data.get("trials", 0), control=data.get("control"), queries=data.get("queries", 0),
                arithmetic=None if arithmetic is None else Arithmetic(**arithmetic),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise UsageError(f"an accumulation tree needs 'n' and 'nodes'; got something else ({error}).") from error
        if data.get("signature", tree.signature) != tree.signature:
            raise UsageError(
                f"the tree says its signature is {data['signature']}, and its nodes give {tree.signature}: it was changed."
            )
        return tree

    @cached_property
    def signature(self) -> str:
        """Terms, depth and a digest of the canonical form: equal for equal trees, short enough for a table."""
        digest = hashlib.sha256(repr((self.n, self.nodes)).encode()).hexdigest()[:10]
        return f"n{self.n}-d{self.depth}-{digest}"

    @cached_property
    def depth(self) -> int:
        """The most additions that one term goes through; 0 for a single term."""
        return max(self._depths, default=0)

    @cached_property
    def _depths(self) -> list[int]:
        depths = [0] * self.n
        for children in self.nodes:
            depths.append(1 + max(depths[child] for child in children))
        return depths

    @property
    def arity(self) -> int:
        """The most terms that one node adds: 2 for ordinary additions, more where hardware adds several at once."""
        return max((len(children) for children in self.nodes), default=0)

    @property
    def root(self) -> int:
        """The id of the last sum; -1 where there is nothing to add."""
        return self.n + len(self.nodes) - 1

    @property
    def is_confirmed(self) -> bool:
        """Whether the replayed tree gave the op's bits on every random input, and its control did not.

        A tree that is not confirmed may be wrong.
        """
        return 0 < self.trials == self.reproduced and (self.control is None or self.control < self.trials)

    def controls(self) -> list[AccumulationTree]:
        """The same shape with the terms in other places (reversed, or turned by one), as far as that is another tree."""
        n = self.n
        places = [[n - 1 - i for i in range(n)], [(i + 1) % n for i in range(n)], [(i - 1) % n for i in range(n)]] if n else []
        moved = [[[place[c] if c < n else c for c in children] for children in self.nodes] for place in places]
        return [tree for nodes in moved if (tree := self.from_nodes(n, nodes)) != self]

    def replay(self, terms: Tensor, others: Tensor | None = None, arithmetic: Arithmetic | None = None) -> Tensor:
        """Adds terms in this tree's order, on the CPU.

        Args:
            terms: [n] or [num_trials, n], float; the summands, or the first factors of the products.
            others: second factors, of the same shape; None where the terms are added as they are.
            arithmetic: how to round; None is what reproduced the op, and else float32 with every product rounded.

        Returns:
            [] or [num_trials], in the accumulator's dtype. NaN and Inf follow IEEE 754; an empty tree gives +0.0.

        Raises:
            UsageError: the last axis does not hold n terms.
        """
        if terms.shape[-1:] != (self.n,) or terms.ndim > 2 or (others is not None and others.shape != terms.shape):
            shapes = str(list(terms.shape)) + ("" if others is None else f" and {list(others.shape)}")
            raise UsageError(f"replay needs {self.n} terms on the last axis, as [n] or [num_trials, n]; got {shapes}.")
        how = arithmetic or self.arithmetic or Arithmetic(products=NONE if others is None else ROUNDED)
        if terms.ndim == 1:
            terms, others = terms[None], None if others is None else others[None]
            return evaluate(self.n, self.nodes, how, terms, others)[0]
        return evaluate(self.n, self.nodes, how, terms, others)

    def describe(self) -> str:
        """The tree in words: its chains, lanes and blocks, and whether the replay confirmed it."""
        return f"{describe(self.n, self.nodes)}{self._verdict()}"

    def _verdict(self) -> str:
        if not self.trials:
            return ""
        how = f" ({self.arithmetic.words})" if self.arithmetic is not None else ""
        if self.is_confirmed:
            control = "" if self.control is None else f" (with its terms in other places: {self.control})"
            return f". Replayed on random inputs{how}: the op's bits in {self.reproduced} of {self.trials}{control}."
        if self.reproduced == self.trials:
            return (
                f". NOT CONFIRMED: replayed on random inputs{how}, it gives the op's bits in {self.reproduced} of "
                f"{self.trials}, and so does a tree with its terms in other places: these bits do not show the order."
            )
        return (
            f". NOT CONFIRMED: replayed on random inputs, it gives the op's bits in {self.reproduced} of {self.trials}, so the "
            "op adds otherwise than this tree, or rounds in a way that was not tried."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them."""
        return {
            "n": self.n, "nodes": [list(children) for children in self.nodes], "signature": self.signature,
            "depth": self.depth, "arity": self.arity, "op": self.op, "queries": self.queries,
            "arithmetic": None if self.arithmetic is None else self.arithmetic.to_json(),
            "reproduced": self.reproduced, "trials": self.trials, "control": self.control, "words": self.describe(),
        }  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AccumulationTree):
            return NotImplemented
        return self.n == other.n and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash((self.n, self.nodes))

    def __str__(self) -> str:
        title = f"{self.op or 'accumulation tree'} · {self.signature}"
        return "\n".join([title, self.describe(), *outline(self.n, self.nodes)])

    def _repr_html_(self) -> str:
        sign = "" if self.is_confirmed or not self.trials else "<strong>not confirmed</strong> · "
        return (
            f"<div>{sign}<code>{html.escape(self.op or 'accumulation tree')}</code> · <code>{self.signature}</code>"
            f"<p>{html.escape(self.describe())}</p>"
            f"<pre style='line-height:1.25'>{html.escape(chr(10).join(outline(self.n, self.nodes)))}</pre></div>"
        )


def _canonical(n: int, nodes: Sequence[Sequence[int]]) -> Nodes:
    """Children by their first term, nodes in post-order from the root; refuses what is no tree."""
    if not is_count(n):
        raise UsageError(f"a tree needs a number of terms of at least 0; got n={n!r}.")
    seen = [False] * (n + len(nodes))
    first = list(range(n))
    ordered: list[list[int]] = []
    for at, children in enumerate(nodes):
        if len(children) < 2:
            raise UsageError(f"an inner node adds at least two children; node {n + at} has {list(children)}.")
        for child in children:
            if not is_count(child) or child >= n + at or seen[child]:
                raise UsageError(
                    f"node {n + at} has the child {child!r}: a child is a term (0 to {n - 1}) or an earlier node, and belongs "
                    "to one parent."
                )
            seen[child] = True
        ordered.append(sorted(children, key=first.__getitem__))
        first.append(first[ordered[-1][0]])
    loose = [node for node, has_parent in enumerate(seen) if not has_parent]
    if len(loose) != min(1, n):
        raise UsageError(f"a tree has one root; these have no parent: {loose[:5]}.")
    new: dict[int, int] = {leaf: leaf for leaf in range(n)}
    result: list[tuple[int, ...]] = []
    stack = [(loose[0], False)] if nodes else []
    while stack:
        node, is_done = stack.pop()
        if node < n:
            continue
        if is_done:
            new[node] = n + len(result)
            result.append(tuple(new[child] for child in ordered[node - n]))
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(ordered[node - n]))
    return tuple(result)
