"""Exhibits that compute, in a real browser: their arithmetic is the library's, and every reader can use them."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from axe import AXE
from chromium import PATIENCE, PHONE, browser, watch
from playwright.sync_api import Browser, Page
from quick import first
from test_browser import AGREEMENT, live_faults

from psgd_lit.exhibit import bundle, normals, static_page
from psgd_lit.live import _CHECKS, EXHIBITS, live

__all__ = ["browser"]

SHELL = """<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Exhibit</title><style>
html[data-theme=dark] {{ --pst-color-text-base: #ced6dd; --pst-color-text-muted: #9ca4af;
  --pst-color-background: #121212; background: #121212 }}
body {{ margin: 1rem }}</style></head><body>{body}</body></html>"""
ROOT = "[data-live]"
Opener = Callable[..., Page]
exhibit = functools.cache(live)


class Window(NamedTuple):
    """A tab in which one page is opened after the other, what has gone wrong in it, and what it has asked for."""

    page: Page
    found: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[Callable[..., Window]]:
    """A function that gives a tab with some options, offline: the same again for the same options."""
    windows: dict[str, Window] = {}

    def made(**options: Any) -> Window:
        key = repr(sorted(options.items()))
        if key not in windows:
            page = browser.new_context(offline=True, **options).new_page()
            page.set_default_timeout(PATIENCE)
            windows[key] = Window(page, watch(page), [])
            page.on("request", lambda request: windows[key].requests.append(request.url))
        return windows[key]

    yield made
    for one in windows.values():
        one.page.context.close()


@pytest.fixture
def open_page(window: Callable[..., Window], tmp_path: Path) -> Iterator[Opener]:
    """A function that opens exhibits in a page of their own, offline; in the end, nothing may have gone wrong."""
    used: list[Window] = []

    def check(one: Window) -> None:
        assert one.found == []
        assert one.requests == [one.page.url]

    def opened(
        *names: str,
        theme: str = "light",
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Page:
        shown = [replace(exhibit(name), state={**exhibit(name).state, **(settings or {})}) for name in names]
        pages = [static_page(one.name, one.state, one.check) for one in shown]
        path = tmp_path / f"{len(used)}.html"
        path.write_text(SHELL.format(theme=theme, body="".join(pages)), encoding="utf-8")
        page, found, requests = one = window(**{"viewport": {"width": 900, "height": 1000}, **options})
        if one in used:
            check(one)
        page.goto("about:blank")
        found.clear()
        requests.clear()
        page.goto(path.as_uri())
        page.locator(".lv-agrees[data-difference]").first.wait_for()
        used.append(one)
        return page

    yield opened
    for one in used:
        check(one)


def get(page: Page, key: str) -> Any:
    """A setting of the first exhibit."""
    return page.evaluate("key => document.querySelector('[data-live]').model.get(key)", key)


def put(page: Page, **settings: Any) -> None:
    """Change settings of the first exhibit, as Python would."""
    page.evaluate(
        "all => Object.entries(all).forEach(e => document.querySelector('[data-live]').model.set(...e))",
        settings,
    )
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


RESTED = """async () => {
  const wait = () => new Promise(done => setTimeout(done, 100));
  for (let last = NaN; last !== scrollY; await wait()) last = scrollY;
}"""
"""Until the page scrolls no more: a tap while it does only stops it."""


def pictures(page: Page) -> list[str]:
    """What the canvases of the first exhibit show."""
    return page.locator(ROOT).first.evaluate("e => [...e.querySelectorAll('canvas')].map(c => c.toDataURL())")


def middle(page: Page, name: str) -> tuple[float, float]:
    """The middle of a part."""
    box = page.locator(name).first.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


# Arithmetic ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compute(browser: Browser) -> Iterator[Callable[[str, str, Any], Any]]:
    """A function that calls a function of an exhibit's module in the browser."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto("about:blank")
    for name in EXHIBITS:
        draws = "seed => { const normal = normals(seed); return Array.from({ length: 200 }, normal); }"
        code = bundle(name).replace("export default { render };", f"window.{name} = {{ check, draws: {draws} }};")
        page.add_script_tag(content=code, type="module")
        page.wait_for_function(f"window.{name}")
    yield lambda name, function, value: page.evaluate(f"value => {name}.{function}(value)", value)
    context.close()


def test_random_numbers_agree(compute: Callable[[str, str, Any], Any]) -> None:
    """Both languages draw the same numbers, for small and large seeds."""
    for seed in (0, 1, 99, 2**31, 2**32 - 1):
        mine = compute("race", "draws", seed)
        assert max(abs(a - b) for a, b in zip(mine, normals(seed, 200).tolist(), strict=True)) < 1e-13


def other(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The settings with other numbers: another seed, and each number that may be any a little larger."""
    turned = {key: value + 0.1 * number for key, value in state.items() if type(value) is float}
    return {**state, **turned, **({"seed": state["seed"] + number} if "seed" in state else {})}


@pytest.mark.parametrize("name", EXHIBITS)
def test_arithmetic_agrees(name: str, compute: Callable[[str, str, Any], Any]) -> None:
    """What the page computes is what the library computes, at other settings than the page's own too."""
    assert 0 < compute(name, "check", exhibit(name).check) < AGREEMENT
    for number in (1, 2):
        reference = _CHECKS[name](other(EXHIBITS[name], number))
        assert 0 < compute(name, "check", reference) < AGREEMENT


def leaves(value: Any) -> Iterator[tuple[list[Any], int]]:
    """All places in nested lists and tables where a list holds a fraction: the list and the place in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(inner, float) and isinstance(value, list):
            yield value, key
        yield from leaves(inner)


@pytest.mark.parametrize("name", EXHIBITS)
def test_agreement_can_fail(name: str, compute: Callable[[str, str, Any], Any]) -> None:
    """Each number that the library gives is compared: changed in the sixth digit, it is seen."""
    whole = json.loads(json.dumps(exhibit(name).check))
    places = list(leaves(whole))
    for container, key in places[:: max(1, len(places) // 40)]:
        kept, container[key] = container[key], container[key] + 1e-5 * (1 + abs(container[key]))
        assert compute(name, "check", whole) > AGREEMENT
        container[key] = kept


# Every reader ----------------------------------------------------------------------------------------------------


VIOLATIONS = """async () =>
(await axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"] })).violations
.map(v => `${v.id}: ${v.nodes.map(n => n.html.slice(0, 120)).join(" ")}`)"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", first(1, EXHIBITS))
def test_exhibit_is_whole(name: str, theme: str, open_page: Opener) -> None:
    """On a phone, in both themes, it agrees, is as wide as the screen, and each part has a name and a size to touch.

    And axe has nothing against it, on levels A and AA.
    """
    page = open_page(name, theme=theme, viewport=PHONE)
    assert list(live_faults(page.locator(ROOT), name)) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (
        page.evaluate("[...document.querySelectorAll('input')].filter(e => !e.labels[0]?.textContent.trim()).length")
        == 0
    )
    assert page.evaluate(
        "[...document.querySelectorAll('canvas')].every(e => e.getAttribute('aria-label')?.length > 20)"
    )
    small = "[...document.querySelectorAll('button, label, .lv-grip')].filter(e => e.offsetHeight < 24).length"
    assert page.evaluate(small) == 0
    page.evaluate(AXE)
    assert page.evaluate(VIOLATIONS) == []


@pytest.mark.parametrize("name", first(1, EXHIBITS))
def test_theme_changes_pictures(name: str, open_page: Opener) -> None:
    """A change of theme draws again."""
    page = open_page(name)
    before = pictures(page)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    put(page)
    assert all(a != b for a, b in zip(before, pictures(page), strict=True))


@pytest.mark.parametrize("name", first(1, EXHIBITS))
def test_every_control_works_by_keyboard(name: str, open_page: Opener) -> None:
    """Each slider changes a picture and says its value, and each radio button chooses."""
    page = open_page(name)
    for control in page.locator(f"{ROOT} input[type=range]:enabled").all():
        seen, said = set(), set()
        for key in ("Home", "ArrowRight", "PageUp", "End"):
            control.press(key)
            put(page)
            seen.add(tuple(pictures(page)))
            said.add(control.get_attribute("aria-valuetext"))
        assert len(seen) > 1
        assert len(said) > 1
    for control in page.locator(f"{ROOT} input[type=radio]").all():
        control.focus()
        control.press("Space")
        put(page)
        assert control.is_checked()


def test_axe_can_fail(open_page: Opener) -> None:
    """A slider without a label and a pale text are found."""
    page = open_page("pole")
    page.evaluate("document.querySelector('.lv-damping span').remove()")
    page.evaluate("document.querySelector('.lv-damping output').remove()")
    page.evaluate("document.querySelector('.lv-say').style.color = '#eee'")
    page.evaluate(AXE)
    found = [violation.partition(":")[0] for violation in page.evaluate(VIOLATIONS)]
    assert {"label", "color-contrast"} <= set(found)


GRIPS = [name for name in EXHIBITS if "start" in EXHIBITS[name]]


@pytest.mark.parametrize("name", first(1, GRIPS))
def test_drag_with_mouse(name: str, open_page: Opener) -> None:
    """The mouse drags the point, and a click brings it to a place; it doesn't leave the map."""
    page = open_page(name)
    before, shown = get(page, "start"), pictures(page)
    x, y = middle(page, ".lv-grip")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y + 40, steps=4)
    page.mouse.up()
    put(page)
    after = get(page, "start")
    assert after[0] < before[0]
    assert after[1] < before[1]
    assert pictures(page) != shown
    page.mouse.click(*middle(page, ".lv-map"))
    put(page)
    box = middle(page, ".lv-grip"), middle(page, ".lv-map")
    assert max(abs(a - b) for a, b in zip(*box, strict=True)) < 2
    page.mouse.down()
    page.mouse.move(-50, -50)
    page.mouse.up()
    put(page)
    edge = page.locator(".lv-map").bounding_box()
    assert edge is not None
    assert abs(middle(page, ".lv-grip")[0] - edge["x"]) < 2


@pytest.mark.parametrize("name", first(1, GRIPS))
def test_drag_with_finger(name: str, open_page: Opener) -> None:
    """A finger drags the point, taps a place, and scrolls the page when it moves over the map."""
    page = open_page(name, viewport=PHONE, has_touch=True)
    touch = page.context.new_cdp_session(page)

    def swipe(x: float, y: float, dx: float, dy: float) -> None:
        for kind, way in (("touchStart", 0), ("touchMove", 0.5), ("touchMove", 1)):
            points = [{"x": x + way * dx, "y": y + way * dy}]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        put(page)
        page.evaluate(RESTED)

    before = get(page, "start")
    swipe(*middle(page, ".lv-grip"), -50, 30)
    dragged = get(page, "start")
    assert dragged[0] < before[0]
    assert dragged[1] < before[1]
    assert page.evaluate("scrollY") == 0
    x, y = middle(page, ".lv-map")
    swipe(x + 90, y + 60, 0, -120)
    assert get(page, "start") == dragged
    for _ in range(3):  # a tap while the page still scrolls only stops it
        if get(page, "start") == dragged:
            page.touchscreen.tap(*middle(page, ".lv-map"))
            put(page)
    assert get(page, "start") != dragged


@pytest.mark.parametrize("name", first(1, GRIPS))
def test_move_with_keys(name: str, open_page: Opener) -> None:
    """The arrow keys move the point, with shift five times as far, and a screen reader hears where it is."""
    page = open_page(name)
    grip = page.locator(".lv-grip")
    places = [get(page, "start")]
    for key in ("ArrowLeft", "ArrowDown", "Shift+ArrowLeft"):
        grip.press(key)
        put(page)
        places.append(get(page, "start"))
    left, down, far = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(places)]
    assert left[0] < 0 == left[1]
    assert down[1] < 0 == down[0]
    assert abs(far[0] / left[0] - 5) < 1e-9
    x, y = places[-1]
    assert grip.get_attribute("aria-valuetext") == f"x {x:.2f}, y {y:.2f}"


def entry(page: Page, row: int, column: int) -> tuple[float, float]:
    """An entry of the painted matrix and the one across the diagonal, rows and columns from 1."""
    matrix = get(page, "matrix")
    return matrix[8 * row + column - 9], matrix[8 * column + row - 9]


def test_paint_with_mouse(open_page: Opener) -> None:
    """A stroke paints each entry that it crosses and the entries across the diagonal, and the ranking follows."""
    page = open_page("paint")
    shown, cells = pictures(page), page.locator(".lv-cell")
    page.get_by_label("3", exact=True).check()
    for place, act in ((1, page.mouse.down), (4, page.mouse.up)):
        box = cells.nth(place).bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=12)
        act()
    put(page)
    assert [entry(page, 1, column) for column in (2, 3, 4, 5)] == [(3, 3)] * 4
    assert entry(page, 1, 1) == (4, 4)
    assert get(page, "preset") == "mine"
    assert pictures(page) != shown
    before = get(page, "matrix")
    page.mouse.move(*middle(page, ".lv-cells"), steps=4)
    assert get(page, "matrix") == before  # the button is up


def test_paint_with_finger(open_page: Opener) -> None:
    """A tap paints one entry."""
    page = open_page("paint", viewport=PHONE, has_touch=True)
    page.locator(".lv-brush input").first.check()
    page.locator(".lv-cell").nth(7).tap()
    put(page)
    assert entry(page, 1, 8) == (-1, -1)


def test_paint_with_keys(open_page: Opener) -> None:
    """The arrow keys go from entry to entry and stop at the border, space paints, and each entry says where it is."""
    page = open_page("paint")
    cells = page.locator(".lv-cell")
    assert page.locator(".lv-cell[tabindex='0']").count() == 1
    cells.first.focus()
    for key in ("ArrowUp", "ArrowDown", "ArrowRight", "ArrowRight", "Space"):
        page.keyboard.press(key)
    put(page)
    assert entry(page, 2, 3) == (1, 1)
    assert page.evaluate("document.activeElement.ariaLabel") == "row 2, column 3: 1"
    assert page.locator(".lv-cell[tabindex='0']").count() == 1


@pytest.mark.parametrize("preset", first(1, ["a product", "diagonal", "random"]))
def test_presets_of_paint(preset: str, open_page: Opener) -> None:
    """Each preset is another symmetric matrix, which the dense form fits."""
    page = open_page("paint")
    before = get(page, "matrix")
    page.get_by_label(preset, exact=True).check()
    put(page)
    matrix = get(page, "matrix")
    assert matrix != before
    assert all(entry(page, i, j)[0] == entry(page, i, j)[1] for i in range(1, 9) for j in range(1, 9))
    ranked = page.locator(".lv-rank").get_attribute("aria-label") or ""
    assert float(re.search(r"dense ([\d.]+)", ranked)[1]) < 1.2


def test_singular_hessian(open_page: Opener) -> None:
    """Where the painted Hessian is singular no form is close, and the page says so instead of a number."""
    page = open_page("paint")
    put(page, matrix=[0.0] * 64)
    assert "more than 10000" in page.locator(".lv-say").inner_text()


def test_fates_at_the_cliff(open_page: Opener) -> None:
    """A threshold saves the run that is thrown over the cliff without one."""
    page = open_page("cliff")
    own, bare = page.locator(".lv-say").inner_text().split(";")
    assert "is at the minimum" in own
    assert "is thrown over the cliff" in bare


def test_rules_of_the_mixture(open_page: Opener) -> None:
    """Divided by themselves the slopes lead to the median, and by what is remembered to the criterion's minimum."""
    page, found = open_page("mixture"), {}
    for rule in ("its own size", "the largest in memory"):
        page.get_by_label(rule, exact=True).check()
        put(page)
        found[rule] = float(page.locator(".lv-say").inner_text().split("mean of P is ")[1].split(";")[0])
    minimum, median = (0.1 + 0.9 * 0.01**2) ** -0.5, 100
    assert abs(found["its own size"] - median) < 0.2 * median
    assert abs(found["the largest in memory"] - minimum) < 0.3 * minimum


PLAYED = [name for name in EXHIBITS if "t" in EXHIBITS[name]]


@pytest.mark.parametrize("name", first(1, PLAYED))
def test_play_step_reset(name: str, open_page: Opener) -> None:
    """Play moves by itself, to the end; pause holds, step goes one on, reset goes back."""
    page = open_page(name, settings={"t": 0})
    assert get(page, "t") == 0
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('[data-live]').model.get('t') > 3")
    page.get_by_role("button", name="Pause").click()
    held = get(page, "t")
    page.wait_for_timeout(150)
    assert get(page, "t") == held
    page.get_by_role("button", name="Step").click()
    assert get(page, "t") == held + 1
    page.get_by_role("button", name="Reset").click()
    assert get(page, "t") == 0


@pytest.mark.parametrize("name", first(1, PLAYED))
def test_reduced_motion(name: str, open_page: Opener) -> None:
    """Who asks for less motion gets none: nothing starts, and play shows the end at once."""
    own = {"autoplay": True} if "autoplay" in EXHIBITS[name] else {}
    page = open_page(name, settings={"t": 0, **own}, reduced_motion="reduce")
    page.wait_for_timeout(150)
    assert get(page, "t") == 0
    page.get_by_role("button", name="Play").click()
    assert get(page, "t") == EXHIBITS[name]["t"]
    assert page.get_by_role("button", name="Pause").count() == 0


def test_autoplay(open_page: Opener) -> None:
    """The race of the landing page starts by itself, and can be paused."""
    page = open_page("race", settings={"t": 0, "autoplay": True})
    page.wait_for_function("document.querySelector('[data-live]').model.get('t') > 3")
    page.get_by_role("button", name="Pause").click()
    assert get(page, "t") < 120


def test_race_is_tuned(open_page: Opener) -> None:
    """Rates are said, follow the problem, and time counted in gradients gives the cheap methods more steps."""
    page = open_page("race")
    said = page.locator(".lv-legend").inner_text()
    assert said.count("rate ") == 5
    assert said.count("memory ") == 2
    assert "step of Q" in said
    put(page, surface="rosenbrock", start=[-1.0, 1.0])
    assert page.locator(".lv-legend").inner_text() != said
    before = page.locator(".lv-say").inner_text()
    page.get_by_label("gradients", exact=True).check()
    put(page)
    after = page.locator(".lv-say").inner_text()
    assert get(page, "t") == 360
    assert "after 360 gradients" in after
    assert "after 120 steps" in before
    assert page.locator(".lv-condition input").is_disabled()


def test_methods_can_be_left_out(open_page: Opener) -> None:
    """A method that isn't chosen isn't run, and none may be."""
    page = open_page("race")
    for box in page.locator(".lv-legend input").all():
        box.uncheck()
        put(page)
    assert get(page, "methods") == []
    assert "no method is chosen" in page.locator(".lv-say").inner_text()


@pytest.mark.slow
def test_two_exhibits_on_a_page(open_page: Opener) -> None:
    """Each takes its own place, and they don't hear one another."""
    page = open_page("race", "race")
    assert page.locator(".lv-agrees[data-difference]").count() == 2
    put(page, angle=0.1)
    assert page.evaluate("document.querySelectorAll('[data-live]')[1].model.get('angle')") == 0.6
