"""What axe-core finds on an open page, in light and dark, at levels A and AA of WCAG 2.

What formulas, paragraphs, lines of code, links and the index repeat is looked at once a page for each look: so
a page takes seconds, not a minute.
The names of the rules are axe's; https://dequeuniversity.com/rules/axe/ explains them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

axe_playwright_python = pytest.importorskip("axe_playwright_python", reason="say `pip install axe-playwright-python`")

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
OF_COLOUR = ["color-contrast", "link-in-text-block"]
"""The rules that depend on the theme; the others are tried in one theme alone."""
STILL = "*, *::before, *::after { transition: none !important; animation: none !important }"

THIN = """() => {
  document.querySelectorAll("details").forEach(e => { e.open = true });
  const look = e => ["", "::before", "::after"].flatMap(part => {
    const s = getComputedStyle(e, part || null);
    return [s.color, s.backgroundColor, s.fontSize, s.fontWeight, s.opacity, part && s.content];
  }).concat(e.closest(".cell_input, .cell_output, summary, th, tr, div")?.className, e.role, e.getAttributeNames());
  const seen = new Set(), left = new Set();
  const twice = e => {
    const parts = [e, ...e.querySelectorAll("*")].filter(e => !left.has(e));
    const key = [e.tagName, ...parts.map(e => look(e).join())].join(";");
    return seen.has(key) || !seen.add(key);
  };
  const inside = e => e.parentElement.closest("a, label, summary, button");
  const named = e => e.textContent.trim() || (e.matches("button") && (e.ariaLabel || e.title));
  const whole = e => e.matches("a, button") || [...e.children].every(e => left.has(e) || e.matches("wbr"));
  const words = "p, li, td, th, a, span, code, em, strong, cite, button.copybtn";
  for (const e of [...document.querySelectorAll(words)].reverse())
    if (!e.id && named(e) && !inside(e) && whole(e) && twice(e)) left.add(e);
  left.forEach(e => e.remove());
  [...document.querySelectorAll("mjx-container")].slice(1).forEach(e => e.remove());
}"""
"""Open all folds; leave a word, a link and a button that copies for each look and place, and the first formula."""

RUN = """async ([theme, rules]) => {
  document.documentElement.dataset.theme = theme;
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const found = await axe.run(document, { runOnly: rules, resultTypes: ["violations"] });
  return found.violations.flatMap(v => v.nodes.map(n => [v.id, n.html.slice(0, 90), n.failureSummary]));
}"""

WRITTEN = """theme => {
  document.documentElement.dataset.theme = theme;
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/^rgba\\(.*, 0\\)$|^transparent$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("article *")].flatMap(e => ["::before", "::after"].flatMap(part => {
    const style = getComputedStyle(e, part), words = style.content.match(/^"(.*\\w.*)"$/);
    return words && e.checkVisibility() ? [[words[1], style.color, ground(e)]] : [];
  }));
}"""
"""The words that style sheets write into the text, which axe can't judge: the words, their colour and their ground."""


def luminance(colour: str) -> float:
    """The relative luminance of `rgb(...)`, as WCAG defines it."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in parts]
    return sum(weight * s for weight, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def findings(page: Page) -> Iterator[str]:
    """What axe finds on an open page, and words of style sheets that are too faint, a line each; it strips the page."""
    page.add_style_tag(content=STILL)
    page.evaluate("async () => { await window.MathJax?.startup?.promise }")
    page.evaluate(THIN)
    page.add_script_tag(content=AXE)
    for theme, rules in (("light", LEVELS), ("dark", OF_COLOUR)):
        for rule, html, why in page.evaluate(RUN, [theme, rules]):
            yield f"{theme}: {rule}: {html}: {' '.join(why.split())[:160]}"
        for words, ink, ground in {tuple(one) for one in page.evaluate(WRITTEN, theme)}:
            if contrast(ink, ground) < 4.5:
                yield f"{theme}: {words!r} has a contrast of {contrast(ink, ground):.1f}, and 4.5 is the least"
