"""The memory page in a real browser (Debian's Chromium), over the real server and the real SmolLM2.

OCTAVO_SCREENSHOTS=1 also redraws docs/memory-page.png. OCTAVO_FRAMES=1 prints how fast the page draws 10,000 blocks.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.async_llm import AsyncLLM
from octavo.server.run import Server, bind
from octavo.server.settings import ServerSettings
from tests.server.toys import toy_server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")

DOCS = Path(__file__).parents[2] / "docs"
PROMPT = "Write the opening of a story about an octopus who runs a printing press. Use one paragraph."


@contextmanager
def serving(llm: AsyncLLM, **settings: Any) -> Iterator[str]:
    listening, ready = bind(served := ServerSettings(model_names=("smollm2",), port=0, **settings)), threading.Event()
    server = Server(llm, served, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.handle_exit(15, None)
        server.handle_exit(15, None)
        thread.join(20)
        assert not thread.is_alive(), "the server did not end though all it had left were open pages"


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[AsyncLLM]:
    found = AsyncLLM(smollm2_path, num_blocks=480, max_model_len=2048)
    yield found
    found.close()


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    with serving(llm) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(browser: Any, url: str, *, script: str = "", quiet: bool = True, **context: Any) -> Iterator[Any]:
    """A page of its own; afterwards its console must be empty and nothing asked of any other host."""
    context = {"viewport": {"width": 1360, "height": 900}, **context}
    tab = browser.new_context(**context)
    page = tab.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith((url, "data:")) else None)
    if script:
        page.add_init_script(script)
    page.goto(url)
    try:
        yield page
        if quiet:
            assert said == []
    finally:
        tab.close()


def until(check: Callable[[], Any], seconds: float = 20, page: Any = None) -> Any:
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, "it did not come to pass in time"
        page.wait_for_timeout(40) if page else time.sleep(0.04)
    return found


def counts(page: Any) -> dict[str, int]:
    texts = page.eval_on_selector_all("[data-n]", "all => all.map(e => [e.dataset.n, e.textContent])")
    return {name: int(text.replace(",", "")) for name, text in texts}


COLOUR = """([block, shown]) => {
    const field = document.querySelector("#field .base"), width = field.clientWidth, ratio = field.width / width;
    const size = Math.min(34, Math.floor(Math.sqrt(width * 330 / shown))), columns = Math.floor(width / size);
    const x = Math.round(block % columns * width / columns) + 2, y = Math.floor(block / columns) * size + size - 5;
    const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    copy.drawImage(field, Math.round(x * ratio), Math.round(y * ratio), 1, 1, 0, 0, 1, 1);
    return [...copy.getImageData(0, 0, 1, 1).data].join();
}"""


def colour_of(page: Any, block: int) -> str:
    """The colour of a cell near its lower left corner, as drawn while the page shows its first 192 blocks."""
    return str(page.evaluate(COLOUR, [block, 192]))


def ask_many(page: Any, n: int, tokens: int, prompt: str = PROMPT) -> None:
    page.fill("#many-prompt", prompt)
    page.fill("#many-n", str(n))
    page.fill("#many-tokens", str(tokens))
    page.click("#pane-many .go")


DRAWN = """() => {
    const heads = [...document.querySelectorAll(".ptable .lab")].slice(1);
    const labels = heads.map(e => Number(e.textContent.split(" ")[1]));
    const tables = labels.map(label => [label, []]);
    for (const cell of document.querySelectorAll(".pcell")) {
        const { gridRowStart, gridRowEnd } = getComputedStyle(cell), first = parseInt(gridRowStart) - 2;
        const logical = Number(cell.dataset.at.split(".")[1]);
        for (let i = 0; i < parseInt(gridRowEnd.slice(5)); i++)
            tables[first + i][1][logical] = Number(cell.dataset.block);
    }
    return tables;
}"""


def drawn_tables(page: Any) -> dict[int, list[int]]:
    """The block table as drawn: answer -> physical blocks in logical order; a cell may stand for several answers."""
    return dict(page.evaluate(DRAWN))


def told_tables(url: str, request: str) -> dict[int, list[int]]:
    found = httpx.get(f"{url}/memory/requests/{request}")
    return {} if found.status_code == 404 else {s["sequence"]: s["table"] for s in found.json()["sequences"]}


def running(url: str) -> list[str]:
    return [row["id"] for row in httpx.get(f"{url}/memory/snapshot").json()["requests"]]


def test_chat_streams_and_cells_change_colour(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector("#main:not([hidden])")
        assert counts(page)["free"] == 480
        free = colour_of(page, 0)
        page.click("#tab-chat")
        page.fill("#chat-prompt", "Why do octopuses have eight arms?")
        page.fill("#chat-tokens", "150")
        page.keyboard.press("Tab")
        page.focus("#chat-prompt")
        page.keyboard.press("Enter")
        answer = page.locator("#pane-chat .out article").nth(1)
        first = until(lambda: len(answer.inner_text()) > 10 and answer.inner_text(), page=page)
        until(lambda: counts(page)["active"] >= 3, page=page)
        assert until(lambda: colour_of(page, 0) != free, page=page)
        active = colour_of(page, 0)
        page.wait_for_selector("#pane-chat .used", timeout=30_000)
        assert answer.inner_text().startswith(first)
        assert len(answer.inner_text()) > len(first)
        until(lambda: counts(page)["cached"] >= 3 and counts(page)["active"] == 0, page=page)
        assert until(lambda: colour_of(page, 0) not in (free, active), page=page)
        page.fill("#chat-prompt", "Say it shorter.")
        page.click("#pane-chat .go")
        until(lambda: "found in memory" in page.inner_text("#pane-chat .out"), page=page)  # the turn before, cached
        assert "cache" in page.inner_text("#events")


def test_four_answers_share_and_copy_and_their_table_is_the_apis(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector("#main:not([hidden])")
        ask_many(page, 4, 1000)
        (request,) = until(lambda: running(url), page=page)

        def agrees() -> bool:
            before, drawn = told_tables(url, request), drawn_tables(page)
            return len(drawn) == 4 and before == drawn == told_tables(url, request) and len(drawn[0]) > 5

        until(agrees, page=page)
        drawn = drawn_tables(page)
        assert len({tuple(table[:3]) for table in drawn.values()}) == 1
        assert len({table[3] for table in drawn.values()}) == 4
        spans = page.eval_on_selector_all(".pcell", "all => all.map(e => getComputedStyle(e).gridRowEnd)")
        assert spans.count("span 4") == 3  # what is shared is drawn as one, joined over its holders
        assert "copies on write" in page.inner_text("#events")
        assert re.search(r"4 answers share 3 blocks|copy of its own", page.inner_text("#story"))
        assert counts(page)["shared"] == 3
        prompt = page.evaluate("document.querySelector('.pcell').click() ?? 1")
        assert prompt
        until(lambda: "answer 3, as logical 0" in page.inner_text("#lens"), page=page)
        assert "system" in page.inner_text("#lens .pieces")  # the tokens as text
        assert len(page.query_selector_all("#lens .chain button")) == 1
        text = page.inner_text("#compare")
        paged, own, model = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) blocks", text))
        assert paged < own < model == 4 * 128
        page.click("#pane-many .go")  # stop: the request is aborted, and its blocks go back
        until(lambda: not running(url), page=page)
        until(lambda: counts(page)["shared"] == 0 and "ended" in page.inner_text("#request"), page=page)


def test_beams_are_drawn_while_they_run(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector("#main:not([hidden])")
        page.click("#tab-beam")
        page.fill("#beam-tokens", "40")
        page.click("#pane-beam .go")
        until(lambda: "beam 3" in page.inner_text("#request"), page=page)
        until(lambda: "4 beams" in page.inner_text("#requests"), page=page)
        page.wait_for_selector("#pane-beam .used", timeout=40_000)
        texts = page.locator("#pane-beam article").all_inner_texts()
        assert len(texts) == 4
        assert all(len(text) > 20 for text in texts)


def test_eviction_preemption_and_swap_are_told_and_shown(browser: Any) -> None:
    with toy_server(num_blocks=40, preemption="swap") as toy, opened(browser, toy.url) as page:
        page.wait_for_selector("#main:not([hidden])")
        body = {"model": "toy", "max_tokens": 90, "ignore_eos": True}
        asked = [
            threading.Thread(target=toy.post, args=("/v1/completions", {**body, "prompt": c * 9})) for c in "abcdef"
        ]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()

        def told() -> bool:
            text = page.inner_text("#events")
            return all(words in text for words in ("stepped aside", "came back from host memory", "taken for new"))

        until(told, page=page)
        assert page.evaluate("document.querySelector('#field .base').clientHeight") > 60  # the host's cells are there


def test_with_a_key_the_page_asks_for_it_and_shows_nothing_before(browser: Any, llm: AsyncLLM) -> None:
    with serving(llm, api_keys=("a-secret",)) as url, opened(browser, url, quiet=False) as page:
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.is_hidden("#main")
        page.fill("#key", "wrong")
        page.click("#key-form button")
        until(lambda: "does not take" in page.inner_text("#key-error"), page=page)
        assert page.is_hidden("#main")
        page.fill("#key", "a-secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#main:not([hidden])")
        assert page.is_hidden("#key-form")
        ask_many(page, 1, 5)
        page.wait_for_selector("#pane-many .used")
        assert page.evaluate("Object.values(sessionStorage)") == ["a-secret"]
        assert page.evaluate("Object.values(localStorage)") == []
        assert page.evaluate("document.cookie") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scroll(browser: Any, url: str, scheme: str) -> None:
    phone = {"width": 360, "height": 740}
    with opened(browser, url, viewport=phone, has_touch=True, is_mobile=True, color_scheme=scheme) as page:
        page.wait_for_selector("#main:not([hidden])")
        ask_many(page, 4, 40)
        until(lambda: drawn_tables(page), page=page)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.tap("#field")
        until(lambda: "Block" in page.inner_text("#lens"), page=page)
        small = page.eval_on_selector_all(
            "button:not(.pcell), input, textarea",
            "all => all.filter(e => e.offsetParent && e.getBoundingClientRect().height < 24).map(e => e.textContent)",
        )
        assert small == []
        page.wait_for_selector("#pane-many .used", timeout=30_000)


def test_all_of_it_works_from_the_keyboard(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector("#main:not([hidden])")
        page.focus("#field")
        for key, block in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", None), ("Home", 0)):
            page.keyboard.press(key)
            spoken = page.inner_text("#field-live")
            assert spoken.startswith("Block ")
            assert block is None or spoken.startswith(f"Block {block}:") or spoken.startswith(f"Block {block},"), key
        page.keyboard.press("Enter")
        until(lambda: page.inner_text("#lens h3") == "Block 0", page=page)
        until(lambda: "slots filled" in page.inner_text("#field-live"), page=page)
        page.focus("#tab-many")
        page.keyboard.press("ArrowRight")
        assert page.get_attribute("#tab-beam", "aria-selected") == "true"
        assert page.is_visible("#pane-beam")
        page.focus("#speed [aria-checked=true]")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#speed [aria-checked=true]") == "Slow"
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#link") == "paused"
        page.focus("#as-table")
        page.keyboard.press("Enter")
        cached = counts(page)["cached"]
        assert cached > 0
        assert len(page.query_selector_all("#block-table tbody tr")) == cached


def test_everything_has_a_name_and_enough_contrast(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector("#main:not([hidden])")
        page.wait_for_timeout(300)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, textarea, canvas, [role]")].filter(e => {
            if (e.getAttribute("aria-hidden") === "true") return false;
            const label = e.labels?.length || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby");
            return !(label || (e.matches("button, [role=status], [role=alert], [role=tooltip]")));
        }).map(e => e.outerHTML.slice(0, 90))"""
        )
        assert nameless == []
        empty = page.eval_on_selector_all(
            "button", "all => all.filter(e => !e.innerText.trim() && e.offsetParent).length"
        )
        assert empty == 0
        ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
        assert len(ids) == len(set(ids))
        for attribute in ("aria-labelledby", "aria-controls", "aria-describedby", "for"):
            named = page.eval_on_selector_all(f"[{attribute}]", f"all => all.map(e => e.getAttribute('{attribute}'))")
            assert set(named) <= set(ids)
        assert page.evaluate("document.querySelectorAll('h1').length") == 1
        for theme in ("light", "dark"):
            if page.evaluate("document.documentElement.dataset.theme") != theme:
                page.click("#theme")
            check_contrast(page)


def check_contrast(page: Any) -> None:
    """WCAG 2.2 contrast of the page's colours: text 4.5 on what it stands on, cells 3 against free ones."""

    def luminance(name: str) -> float:
        text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        text = "#" + "".join(c * 2 for c in text[1:]) if len(text) == 4 else text
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    text = [(ink, ground) for ink in ("ink", "soft") for ground in ("paper", "leaf", "well")]
    text += [
        (f"{kind}-text", ground)
        for kind in ("shared", "active", "cached", "prefill", "swapped")
        for ground in ("paper", "leaf")
    ]
    text += [("accent-ink", "accent"), ("bad", "leaf"), ("paper", "ink"), ("ink", "free"), ("soft", "free")]
    text += [("on-state", "active"), ("on-state", "shared"), ("ink", "active-empty"), ("ink", "shared-empty")]
    assert {pair: contrast(*pair) for pair in text if contrast(*pair) < 4.5} == {}
    assert all(contrast(state, "free") >= 3 for state in ("active", "shared"))


SYNTHETIC = (Path(__file__).parent / "synthetic_feed.js").read_text()


def test_ten_thousand_blocks_are_drawn_as_they_change(browser: Any, url: str) -> None:
    with opened(browser, url, script=SYNTHETIC) as page:
        page.wait_for_selector("#main:not([hidden])")
        page.wait_for_timeout(1000)
        page.evaluate("frames_.length = 0")
        page.wait_for_timeout(6000 if os.environ.get("OCTAVO_FRAMES") else 1000)
        assert page.evaluate("fed") > 10
        assert sum(counts(page).values()) == 10_000
        gaps = page.evaluate("frames_.slice(1).map((t, i) => t - frames_[i])")
        if os.environ.get("OCTAVO_FRAMES"):
            gaps.sort()
            rate = 1000 * len(gaps) / sum(gaps)
            median, worst = gaps[len(gaps) // 2], gaps[-len(gaps) // 100]
            print(f"\n{rate:.1f} frames a second; gaps: median {median:.1f} ms, p99 {worst:.1f} ms")


@pytest.mark.skipif(not os.environ.get("OCTAVO_SCREENSHOTS"), reason="OCTAVO_SCREENSHOTS=1 redraws the picture")
def test_the_picture_in_the_readme(browser: Any, url: str) -> None:
    body = {"model": "smollm2", "max_tokens": 70, "n": 3}
    for question in ("How is paper folded into a book?", "Name three sea animals.", "What is a page table?"):
        httpx.post(
            f"{url}/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": question}]}, timeout=60
        )
    with opened(browser, url, viewport={"width": 1240, "height": 1340}) as page:
        page.wait_for_selector("#main:not([hidden])")
        ask_many(page, 4, 160)
        until(lambda: drawn_tables(page) and len(drawn_tables(page)[0]) > 8, page=page)
        page.click("[data-speed=pause]")  # so that all of the page shows one moment
        page.wait_for_timeout(500)
        page.screenshot(path=str(DOCS / "memory-page.png"))
        assert (DOCS / "memory-page.png").stat().st_size < 300_000
