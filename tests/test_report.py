"""The report is one file: complete, harmless, loading nothing, and there whole or not at all."""

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from detlab.divergence.result import TokenFlip
from detlab.errors import UsageError
from detlab.viz import report_html, write_report
from detlab.viz.report import MAX_ROWS
from tests.viz_cases import diverged, identical, other_path, renamed

EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, scripts, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = attributes, before + data
        elif self._open not in ("style", "title"):
            self.text += data + "\n"

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_report_answers_in_order() -> None:
    page = Page(report_html(diverged()))
    heads = ["Where do two runs part?", "The two conditions", "Diverged", "First divergence", "Controls", "Op by op"]
    heads += ["Origins", "Texts", "What is not shown", "Environment", "Run it again"]
    places = [page.text.find(head) for head in heads]
    assert -1 not in places
    assert places == sorted(places)
    comparison = diverged().comparison
    assert str(comparison.first) in page.text
    assert "batch_size=2" in page.text
    assert "condition a, executed twice, gives the same bits" in page.text
    assert page.text.count("held") == 2
    assert diverged().call in page.text
    assert diverged().environment.fingerprint() in page.text
    assert page.of("html")[0]["lang"] == "en"


@pytest.mark.parametrize(
    ("make", "headline"), [(diverged, "≠ Diverged"), (identical, "= Identical"), (other_path, "⑂ Control flow")]
)
def test_each_verdict_is_told_in_words(make, headline: str) -> None:
    page = Page(report_html(make()))
    assert headline in page.text


def test_nothing_outside_the_file_is_asked_for() -> None:
    text = report_html(diverged())
    page = Page(text)
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "poster", "action", "data", "background"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), f"<{tag} {name}={value}>"
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]


def test_the_policy_names_every_script_and_allows_nothing_else() -> None:
    page = Page(report_html(diverged()))
    (policy,) = [m["content"] for m in page.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    running = [code for attributes, code in page.scripts if attributes.get("type") != "application/json"]
    assert len(running) == 2
    for code in running:
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_figures_are_stored_as_data() -> None:
    page = Page(report_html(diverged()))
    stored = {a["data-figure"]: json.loads(code) for a, code in page.scripts if a.get("type") == "application/json"}
    assert set(stored) == {"overview", "heatmap"}
    assert stored["heatmap"]["data"]
    assert {a["id"] for a in page.of("div") if "id" in a} >= set(stored)


def test_text_from_outside_is_shown_and_never_obeyed() -> None:
    source = diverged()
    comparison = source.comparison
    evil = renamed(
        source,
        prompt_ids=[EVIL, EVIL + "2"],
        label_b=EVIL,
        texts=([EVIL, "a"], ["b", EVIL]),
        token_flips=[TokenFlip(0, EVIL, 1, 5, 6)],
        notes=[EVIL],
        first=replace(comparison.first, module=EVIL, prompt_id=EVIL),
        origins=[replace(d, module=EVIL, op=EVIL, prompt_id=EVIL) for d in comparison.origins],
        controls={EVIL: True},
    )
    text = report_html(replace(evil, call=EVIL))
    page = Page(text)
    assert len(page.scripts) == 4
    assert not any("alert" in code for attributes, code in page.scripts if attributes.get("type") != "application/json")
    assert "alert('x')" in page.text
    assert "<script>alert" not in text


def test_texts_that_part_are_shown_side_by_side() -> None:
    parted = renamed(
        diverged(),
        token_flips=[TokenFlip(1, "second", 1, 17, 18)],
        texts=(["one", "left text"], ["one", "right text"]),
        teacher_forced=True,
    )
    page = Page(report_html(parted))
    for words in ("second", "17", "18", "left text", "right text", "teacher forcing"):
        assert words in page.text
    without = renamed(diverged(), token_flips=[TokenFlip(0, "first", 0, 1, 2)], texts=(None, None))
    assert "no tokenizer" in Page(report_html(without)).text


def test_long_tables_end_and_say_how_much_is_missing() -> None:
    source = diverged()
    one = source.comparison.origins[0]
    many = renamed(source, origins=[one] * (MAX_ROWS + 7))
    text = report_html(many)
    assert "7 more origins are not listed." in text
    assert text.count("<tr><td>model.embed_tokens</td>") == MAX_ROWS


def test_two_environments_are_both_shown() -> None:
    source = diverged()
    other = replace(source.b.environment, versions=source.b.environment.versions | {"torch": "0.0.1"})
    page = Page(report_html(replace(source, b=replace(source.b, environment=other))))
    assert "two environments" in page.text
    assert "torch 0.0.1" in page.text
    assert "two environments" not in Page(report_html(source)).text


def test_a_report_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_report(diverged(), str(path)) == path
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert os.listdir(tmp_path) == ["report.html"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failure_leaves_the_old_report_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match=r"cannot write .*: No space left on device. Nothing was written."):
        write_report(diverged(), path)
    assert os.listdir(tmp_path) == ["report.html"]
    assert path.read_text() == "old"


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(diverged(), tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


def test_paths_that_cannot_be_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder. Give a name, such as .*report.html"):
        write_report(diverged(), tmp_path)
    with pytest.raises(UsageError, match="does not exist. Make it first."):
        write_report(diverged(), tmp_path / "missing" / "report.html")
