"""What is known of a kernel's row counts, in words and as a plan: which calls serve any number of rows at the least cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["LARGE", "SMALL", "ClassMap", "cheapest", "words"]

SMALL = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32)
LARGE = (40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_MANY = 1.15  # several calls must be cheaper than one by so much: times that were measured are not exact
_PIECE_MICROS = 2.0  # what cutting or padding costs beside the copy, microseconds
_COPY_BYTES = 6000.0  # copied in a microsecond


@dataclass(frozen=True)
class ClassMap:
    """What is known of the row counts of one kernel.

    Attributes:
        unit: the class is that of calls of this many rows on one thread, its largest small member.
        members: counts that were found to be of the class, ascending.
        micros: the time of a call of each member, microseconds.
        others: counts that were found not to be of it.
        digest: of the class's bits for the probe's data.
    """

    unit: int
    members: tuple[int, ...]
    micros: tuple[float, ...]
    others: tuple[int, ...]
    digest: str

    def __post_init__(self) -> None:
        whole = (*self.members, *self.others, self.unit)
        if min(whole) < 1 or list(self.members) != sorted(set(self.members)) or len(self.members) != len(self.micros):
            raise ValueError(f"not a class map: {self}")

    def knows(self, count: int) -> bool:
        """Whether a count was probed."""
        return count in self.members or count in self.others

    def with_count(self, count: int, micros: float | None) -> ClassMap:
        """The map with one more count; ``micros`` None: it is not a member."""
        if micros is None:
            return replace(self, others=tuple(sorted({*self.others, count})))
        known = dict(zip(self.members, self.micros, strict=True)) | {count: micros}
        return replace(self, members=tuple(sorted(known)), micros=tuple(known[c] for c in sorted(known)))


def words(counts: tuple[int, ...]) -> str:
    """Row counts in words; what lies between two neighbours of the grid was not probed.

    >>> words((1, 2, 3, 4, 8, 40, 48)), words(())
    ('1..8, 40, 48', 'none')
    """
    grid = sorted({*SMALL, *LARGE, *counts})
    runs: list[list[int]] = []
    for count in counts:
        if runs and grid.index(count) == grid.index(runs[-1][-1]) + 1:
            runs[-1].append(count)
        else:
            runs.append([count])
    return ", ".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs) or "none"


def cheapest(known: ClassMap, rows: int, row_bytes: int) -> tuple[int, ...]:
    """The members that cover so many rows at the least cost measured; the last may be larger than what is left.

    Args:
        known: the map; it has a member.
        rows: at least 1.
        row_bytes: size of a row, for what copying costs.
    """
    cost = dict(zip(known.members, known.micros, strict=True))
    rate = min(cost[c] / c for c in cost)
    best_rate = max(c for c in cost if cost[c] / c <= rate * _MANY)
    head = []
    while rows > 2 * known.members[-1]:
        head.append(best_rate)
        rows -= best_rate
    covers: dict[int, tuple[float, tuple[int, ...]]] = {}

    def copied(count: int) -> float:
        return _PIECE_MICROS + count * row_bytes / _COPY_BYTES

    def cover(left: int) -> tuple[float, tuple[int, ...]]:
        if left <= 0:
            return 0.0, ()
        if left not in covers:
            below = [c for c in cost if c <= left]
            options = [
                (cost[c] + copied(c) + rest, (c, *pieces))
                for c in {*below[-2:], *([best_rate] if best_rate <= left else [])}
                for rest, pieces in [cover(left - c)]
            ]
            above = [c for c in cost if c >= left]
            for c in [c for c in above if c <= 8] or above[:1]:  # a few rows of zeros more may cost less
                options.append((cost[c] + (copied(c) if c > left else 0.0), (c,)))
            covers[left] = min(options, key=lambda option: option[0] * (1.0 if len(option[1]) == 1 else _MANY))
        return covers[left]

    return (*head, *cover(rows)[1])
