"""The four answers of an inquiry as HTML: steps, the paired proof, and what each remedy did. Pure, and all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detlab.viz.words import controls_in_words, escape, plural, short_module, ulps, verdict_words

if TYPE_CHECKING:
    from detlab.inquiry import Fix
    from detlab.investigate import Investigation
    from detlab.remedies.table import Attempt

_SIGNS = {"restores equality": "=", "reduces": "↓", "makes it worse": "↑", "no effect": "≠"}
_UNTRIED = ("other", "?", "Not tried")


@dataclass(frozen=True)
class Step:
    """One of the four questions with its answer so far; "" where there is none. ``css`` is a verdict's class."""

    name: str
    answer: str
    css: str = ""


def steps(result: Investigation | None, fix: Fix | None) -> list[Step]:
    """Where, why, fix, proof."""
    if result is None:
        return [Step(name, "") for name in ("Where", "Why", "Fix", "Proof")]
    words, first = verdict_words(result.verdict), result.comparison.first
    if first is None:
        where = f"{words.sign} {words.headline}"
    else:
        at = f", position {first.position}" if first.position >= 0 else ""
        where = f"{words.sign} {short_module(first.module)} · {first.op}{at}"
    why, fixed, proof = _why(result), "none applied", f"{words.sign} {words.headline}"
    css = words.css
    if fix is not None:
        fixed = " + ".join(fix.names)
        css, sign, headline = verdict_of(fix)
        proof = f"{sign} {headline}"
    return [Step("Where", where, words.css), Step("Why", why), Step("Fix", fixed), Step("Proof", proof, css)]


def _why(result: Investigation) -> str:
    if result.explanation is not None and result.explanation.factors:
        return result.explanation.mechanism.kind
    if result.triage is None:
        return "not asked yet" if result.verdict != "identical" else "nothing to explain"
    if result.triage.verdict == "identical":
        return "nothing to explain"
    cause = f" ({result.triage.cause})" if result.triage.cause else ""
    return f"{result.triage.verdict.replace('_', ' ')}{cause}"


def verdict_of(fix: Fix) -> tuple[str, str, str]:
    """(CSS class, sign, headline) of a pair under a fix."""
    if fix.verdict == "untried":
        return _UNTRIED
    words = verdict_words(fix.verdict)
    return words.css, words.sign, words.headline


def cost_words(attempt: Attempt) -> str:
    """The cost as a factor; "" where it was not measured."""
    return "" if attempt.cost is None else f"{attempt.cost:.2f}×"


def switch_words(attempt: Attempt) -> str:
    """What one remedy did, in one line of plain text."""
    if attempt.after is None:
        return f"? {attempt.verdict}: {attempt.reason}" if attempt.reason else f"? {attempt.verdict}"
    words = f"{_SIGNS.get(attempt.verdict, '?')} {attempt.verdict}: {attempt.after.prompts} of {attempt.after.of} differ"
    if attempt.after.prompts and attempt.after.max_ulp is not None:
        words += f", up to {ulps(attempt.after.max_ulp)}"
    cost = cost_words(attempt)
    return f"{words}; cost {cost}" if cost else words


def fixes_table(fixes: Sequence[Fix]) -> str:
    """Every fix that was tried, with what it did."""
    rows = "".join(
        f"<tr><td>{escape(' + '.join(fix.names))}</td><td>{escape(switch_words(fix.attempt))}</td>"
        f"<td>{escape(fix.attempt.a)}</td><td>{escape(fix.attempt.b)}</td></tr>"
        for fix in fixes
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("remedy", "what it does", "run a with it", "run b with it"))
    caption = "<caption>Each on the pair above, after controls; the cost is time over that without it</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def proof_html(result: Investigation, fix: Fix | None) -> str:
    """The paired proof: the same two conditions without and with the fix, and the cost beside them."""
    cards = [_without(result)]
    if fix is None:
        cards.append(_card("other", "with a fix", "none applied", ["Switch a remedy on above: the pair is run again with it."]))
    else:
        cards += [_with(fix), _cost(fix.attempt)]
    return f'<div class="detlab-pair" role="status">{"".join(cards)}</div>'


def _without(result: Investigation) -> str:
    words, comparison = verdict_words(result.verdict), result.comparison
    of = len(comparison.prompt_ids)
    differ = sum(a != b for a, b in zip(result.a.md5, result.b.md5, strict=True))
    lines = [_answers(differ, of, len(comparison.token_flips))]
    lines += [f"{comparison.rows_compared:,} rows compared", f"Controls: {controls_in_words(comparison)}"]
    return _card(words.css, "without a fix", f"{words.sign} {words.headline}", lines)


def _answers(differ: int, of: int, flips: int) -> str:
    return f"{differ} of {plural(of, 'answer')} differ in a bit; {plural(flips, 'token flip')}"


def _with(fix: Fix) -> str:
    attempt = fix.attempt
    css, sign, headline = verdict_of(fix)
    lines = []
    if attempt.after is not None:
        after = attempt.after
        lines.append(_answers(after.prompts, after.of, after.token_flips))
        if after.bound is not None and after.bound < 1:
            lines.append(f"at most {after.bound:.0%} of such answers do, at 95 % (3 / {after.of})")
        if after.origin:
            lines.append(f"first at {after.origin}")
    if fix.comparison is not None:
        lines += [f"{fix.comparison.rows_compared:,} rows compared", f"Controls: {controls_in_words(fix.comparison)}"]
    elif fix.is_tried:
        lines.append("Answers were compared, ops were not: it needs a fresh process. Controls: both repeat themselves.")
    lines += [words for words in (attempt.reason, attempt.note) if words]
    return _card(css, f"with {' + '.join(fix.names)}", f"{sign} {headline}", lines)


def _cost(attempt: Attempt) -> str:
    how = (
        "median of rounds in which both take turns, in this process"
        if attempt.is_interleaved
        else "the fix ran in a fresh process, so this is a rough figure"
    )
    lines = [f"time of both conditions' model calls over that without a fix; {how}"] if attempt.cost is not None else []
    return _card("neutral", "cost", cost_words(attempt) or "not measured", lines)


def _card(css: str, name: str, headline: str, lines: list[str]) -> str:
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f'<section class="detlab-card detlab-{css}"><span class="name">{escape(name)}</span>'
        f"<strong>{escape(headline)}</strong>{text}</section>"
    )
