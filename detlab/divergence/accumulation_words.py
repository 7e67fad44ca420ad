"""Says what a tree looks like: chains, strided lanes, blocks, pairs. Equal subtrees are named once.

A tree is read from its root as *parts*: what is added one after another is a chain, what is added as a balanced tournament of
equal subtrees is pairs. Equal means equal in shape, whichever terms hang there. Parts nest at most log2(n) deep, so that they
may be walked by recursion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TERM, CHAIN, PAIRS, CYCLE, TOGETHER = "term", "chain", "pairs", "cycle", "together"
MAX_LINES = 40
Nodes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Part:
    """A subtree, or several that are added in a row, with equal ones counted instead of listed.

    Attributes:
        kind: "term"; "chain" (runs are added one after another); "pairs" (one run, in a tournament); "cycle" (runs that repeat
            within a chain; no subtree of its own); "together" (one node of more than two children adds the runs at once).
        nodes: the subtrees it consists of: one, except in a cycle.
        size: terms in it.
        first: the smallest of them.
        runs: what is added, in order.
        distances: of pairs: how far apart the first terms of two partners are, from the first round on.
    """

    kind: str
    nodes: tuple[int, ...]
    size: int
    first: int
    runs: tuple[Run, ...] = ()
    distances: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it adds single terms alone, one after another."""
        return self.kind == CHAIN and len(self.runs) == 1 and self.runs[0].part.kind == TERM


@dataclass(frozen=True)
class Run:
    """Equal parts that are added in a row.

    Attributes:
        part: the first of them.
        members: the subtrees of each.
        starts: the first term of each, in the order in which they are added.
    """

    part: Part
    members: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.members)

    @property
    def step(self) -> int | None:
        """The distance between the first terms of neighbours; None where it varies, or there is one."""
        starts = sorted(self.starts) if self.part.kind != TERM else list(self.starts)
        steps = {b - a for a, b in zip(starts, starts[1:], strict=False)}
        return steps.pop() if len(steps) == 1 else None


class _Reader:
    """Sizes, first terms and shapes of all nodes, and the parts that they make."""

    def __init__(self, n: int, nodes: Nodes) -> None:
        self.n, self.nodes = n, nodes
        self.size, self.first, self.shape, self.rounds = [1] * n, list(range(n)), [0] * n, [0] * n
        known: dict[tuple[int, ...], int] = {}
        for children in nodes:
            self.size.append(sum(self.size[child] for child in children))
            self.first.append(min(self.first[child] for child in children))
            key = tuple(sorted(self.shape[child] for child in children))
            self.shape.append(known.setdefault(key, len(known) + 1))
            is_pair = len(children) == 2 and key[0] == key[1]
            self.rounds.append(self.rounds[children[0]] + 1 if is_pair else 0)

    def part(self, node: int) -> Part:
        if node < self.n:
            return Part(TERM, (node,), 1, node)
        if len(self.nodes[node - self.n]) > 2 and len({self.shape[c] for c in self.nodes[node - self.n]}) == 1:
            return self._whole(TOGETHER, node, [self._run([(child,) for child in self.nodes[node - self.n]])])
        if self.rounds[node] > 1:
            return self._pairs(node)
        return self._chain(node)

    def _whole(self, kind: str, node: int, runs: Sequence[Run], distances: tuple[int, ...] = ()) -> Part:
        return Part(kind, (node,), self.size[node], self.first[node], tuple(runs), distances)

    def _run(self, members: Sequence[tuple[int, ...]]) -> Run:
        starts = tuple(min(self.first[node] for node in member) for member in members)
        part = self.part(members[0][0]) if len(members[0]) == 1 else self._several(members[0])
        return Run(part, tuple(members), starts)

    def _several(self, group: tuple[int, ...]) -> Part:
        """What one node of more than two children adds to a running sum at once."""
        size, first = sum(self.size[node] for node in group), min(self.first[node] for node in group)
        runs = tuple(self._run(members) for members in self._alike([(node,) for node in group]))
        return Part(TOGETHER, group, size, first, runs)

    def _pairs(self, node: int) -> Part:
        level, distances = [node], []
        for _ in range(self.rounds[node]):
            a, b = self.nodes[level[0] - self.n]
            distances.append(abs(self.first[b] - self.first[a]))
            level = [child for parent in level for child in self.nodes[parent - self.n]]
        return self._whole(
            PAIRS, node, [self._run([(child,) for child in sorted(level, key=self.first.__getitem__)])],
            tuple(reversed(distances)),
        )  # fmt: skip

    def _chain(self, node: int) -> Part:
        """Peels equal branches off the top for as long as there are any, then others, down to the start of the chain."""
        groups: list[list[tuple[int, ...]]] = []  # last added first
        at = node
        while at >= self.n and not (groups and self.rounds[at] > 1):
            found, at, is_uniform = self._peel(at)
            groups.append(found)
            if is_uniform:
                break
        else:
            groups.append([(at,)])
        groups.reverse()
        # The single terms that a chain starts with are a block of their own where blocks follow.
        if len(groups) > 1 and groups[0][0][0] < self.n and len(groups[0]) > 1:
            start = self._start_of(node, sum(len(group) for group in groups[1:]))
            groups[0] = [(start,)]
        made = [self._run(members) for group in groups for members in self._alike(group)]
        return self._whole(CHAIN, node, _with_cycles(made))

    def _peel(self, at: int) -> tuple[list[tuple[int, ...]], int, bool]:
        """Equal branches at the top of a spine, the spine below them, and whether that is one more of them."""
        _, wanted = self._split(at)
        shape, found = self._shapes(wanted), []
        while at >= self.n:
            spine, branch = self._split(at)
            if self._shapes(branch) != shape:
                break
            found.append(branch)
            at = spine
        is_uniform = self._shapes((at,)) == shape
        found.reverse()  # in the order in which they are added
        return ([(at,), *found] if is_uniform else found), at, is_uniform

    def _split(self, node: int) -> tuple[int, tuple[int, ...]]:
        """A node's running sum and what is added to it: the larger child is the sum, and of equal ones the earlier."""
        children = self.nodes[node - self.n]
        spine = max(children, key=lambda child: (self.size[child], -self.first[child]))
        return spine, tuple(child for child in children if child != spine)

    def _start_of(self, node: int, num_added: int) -> int:
        for _ in range(num_added):
            node, _branch = self._split(node)
        return node

    def _shapes(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(self.shape[node] for node in group))

    def _alike(self, members: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        run: list[tuple[int, ...]] = []
        for member in members:
            if run and self._shapes(member) != self._shapes(run[0]):
                yield run
                run = []
            run.append(member)
        if run:
            yield run


def _with_cycles(runs: list[Run]) -> list[Run]:
    """Folds runs that repeat: 4 terms, a block, 4 terms, a block, ... become one cycle of the two."""
    keys = [(run.count, run.part.kind, run.part.size, _key(run.part)) for run in runs]
    for start in range(min(3, len(runs))):
        for period in range(2, min(5, (len(runs) - start) // 3 + 1)):
            times = 1
            while keys[start + times * period : start + (times + 1) * period] == keys[start : start + period]:
                times += 1
            if times < 3:
                continue
            cut = [runs[start + i * period : start + (i + 1) * period] for i in range(times)]
            members = [tuple(node for run in one for member in run.members for node in member) for one in cut]
            starts = [min(min(run.starts) for run in one) for one in cut]
            size = sum(run.count * run.part.size for run in cut[0])
            cycle = Run(Part(CYCLE, members[0], size, starts[0], tuple(cut[0])), tuple(members), tuple(starts))
            return [*runs[:start], cycle, *runs[start + times * period :]]
    return runs


def _key(part: Part) -> object:
    return tuple((run.count, run.part.kind, run.part.size, _key(run.part)) for run in part.runs)


def parts(n: int, nodes: Nodes) -> Part | None:
    """Reads a tree (in canonical form) as parts; None for a tree without terms."""
    return _Reader(n, nodes).part(n + len(nodes) - 1) if n else None


def leaves_of(n: int, nodes: Nodes, roots: Sequence[int]) -> list[int]:
    """The terms of subtrees, in ascending order."""
    found, stack = [], list(roots)
    while stack:
        node = stack.pop()
        if node < n:
            found.append(node)
        else:
            stack.extend(nodes[node - n])
    return sorted(found)


# -------------------------------------------------------------------------------------------------------------------- words
def describe(n: int, nodes: Nodes) -> str:
    """A tree in one sentence, without its full stop.

    >>> describe(4, [(0, 1), (4, 2), (5, 3)])
    'a chain of 4 terms one after another'
    >>> describe(4, [(0, 1), (2, 3), (4, 5)])
    '4 terms added in pairs (1, then 2 apart)'
    """
    if n == 0:
        return "no terms, nothing is added"
    if n == 1:
        return "one term, nothing is added"
    part = parts(n, nodes)
    assert part is not None
    return _phrase(part, 0)


def _phrase(part: Part, lanes: int) -> str:
    if part.kind == TERM:
        return f"term {part.first}"
    if part.is_plain:
        return f"a chain of {part.size} terms {_order(part.runs[0])}"
    if part.kind in (CHAIN, TOGETHER, PAIRS) and len(part.runs) == 1:
        return _uniform(part, lanes)
    blocks = [run for run in part.runs if run.part.is_plain and run.part.runs[0].step == 1]
    if part.kind == CHAIN and len(blocks) == len(part.runs):
        sizes = [run.part.size for run in part.runs for _ in run.members]
        if len(sizes) <= 12:
            return f"blocks of {'+'.join(map(str, sizes))}, each a chain of consecutive terms, added one after another"
    said = [_run_phrase(run, lanes) for run in part.runs[:6]]
    if len(part.runs) > 6:
        said.append(f"{len(part.runs) - 6} more steps")
    if part.kind == TOGETHER:
        return f"({' and '.join(said)}) at once"
    return ", then ".join(said)


def _uniform(part: Part, lanes: int) -> str:
    run = part.runs[0]
    what, said = run.part, _phrase(run.part, run.count if _is_lanes(run) else lanes)
    inner = f", each of {said}" if said[0].isdigit() else f", each {said}"
    if what.kind == TERM:
        noun, inner = "terms", ""
    elif _is_lanes(run):
        noun = "strided lanes"
    elif lanes and run.step == lanes:
        noun = f"unrolled ways ({run.step} apart)"
    else:
        noun = "blocks" + (f" ({run.step} apart)" if run.step and run.step != what.size else "")
    if part.kind == TOGETHER:
        return f"{run.count} {noun} added at once{inner}"
    if part.kind == PAIRS:
        apart = ", ".join(map(str, part.distances[:-1])) + f", then {part.distances[-1]} apart"
        return f"{run.count} {noun} added in pairs ({apart}){inner}"
    return f"{run.count} {noun} added one after another{inner}"


def _is_lanes(run: Run) -> bool:
    return run.step == 1 and run.part.size > 1


def _run_phrase(run: Run, lanes: int) -> str:
    part = run.part
    if run.count == 1:
        return f"term {part.first}" if part.kind == TERM else f"({_phrase(part, lanes)})"
    if part.kind == TERM:
        return f"{run.count} terms {_order(run)}"
    if part.kind == CYCLE:
        return f"{run.count} times ({', then '.join(_run_phrase(inner, lanes) for inner in part.runs)})"
    if part.kind == TOGETHER and len(part.nodes) > 1:
        return f"{run.count} times {len(part.nodes)} at once ({_phrase(part, lanes)})"
    noun = "lanes" if _is_lanes(run) else "blocks"
    return f"{run.count} {noun} of ({_phrase(part, run.count if _is_lanes(run) else lanes)})"


def _order(run: Run) -> str:
    """The order of single terms: consecutive, strided, or listed."""
    starts = run.starts
    if run.step == 1:
        return "one after another" if starts[0] == 0 or run.count < 2 else f"one after another from {starts[0]}"
    if run.step is not None and run.step > 0:
        return f"{run.step} apart"
    if run.step == -1:
        return "from the last to the first"
    return f"in the order {', '.join(map(str, starts[:8]))}{', …' if len(starts) > 8 else ''}"


@dataclass(frozen=True)
class Line:
    """One line of a drawing: a part, how often it occurs beside itself, and how deep it is nested."""

    depth: int
    text: str
    count: int
    part: Part
    members: tuple[tuple[int, ...], ...]


def lines(n: int, nodes: Nodes, most: int = MAX_LINES) -> list[Line]:
    """The lines of a drawing, from the root down, with equal subtrees drawn once; at most ``most``."""
    root = parts(n, nodes)
    if root is None:
        return []
    found: list[Line] = []

    def visit(run: Run, depth: int) -> None:
        if len(found) < most:
            found.append(Line(depth, _label(run), run.count, run.part, run.members))
        if not run.part.is_plain:
            for inner in run.part.runs:
                visit(inner, depth + 1)

    visit(Run(root, (root.nodes,), (root.first,)), 0)
    return found


def _label(run: Run) -> str:
    part = run.part
    times = f"{run.count} × " if run.count > 1 else ""
    where = _where(run) if run.count > 1 else ""
    if part.kind == TERM:
        return f"{run.count} terms: {_listed(run.starts)}" if run.count > 1 else f"term {part.first}"
    if part.is_plain:
        return f"{times}chain of {part.size}: {_listed(part.runs[0].starts)}{where}"
    how = {
        CHAIN: "one after another", PAIRS: f"in pairs, {', '.join(map(str, part.distances))} apart",
        CYCLE: "in a cycle", TOGETHER: "at once",
    }[part.kind]  # fmt: skip
    return f"{times}sum of {part.size} terms, {how}{where}"


def _where(run: Run) -> str:
    return f" · from {_listed(run.starts)}" if run.part.kind != TERM else ""


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) <= 5:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:3]))}, … {numbers[-1]}"


def outline(n: int, nodes: Nodes, most: int = MAX_LINES) -> list[str]:
    """A text drawing: one line for each kind of subtree, nested as the tree is."""
    found = lines(n, nodes, most)
    drawn = []
    for at, line in enumerate(found):
        if not line.depth:
            drawn.append(line.text)
            continue
        rails = ""
        for depth in range(1, line.depth):
            rails += "│  " if _goes_on(found, at, depth) else "   "
        drawn.append(f"{rails}{'├─ ' if _goes_on(found, at, line.depth) else '└─ '}{line.text}")
    return drawn if len(found) < most else [*drawn, "…"]


def _goes_on(found: list[Line], at: int, depth: int) -> bool:
    for line in found[at + 1 :]:
        if line.depth <= depth:
            return line.depth == depth
    return False
