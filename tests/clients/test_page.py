"""The live page in a browser: Chromium without a window, driven by Playwright."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_process import SLOW_COMMAND, ServerProcess

PATIENCE = 60_000  # milliseconds: the machine may have other work


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def slow_server(serve: Callable[..., AbstractContextManager[ServerProcess]]) -> Iterator[ServerProcess]:
    """One that a browser can follow."""
    with serve(program=SLOW_COMMAND) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser said was wrong, and every address that is not the server's."""
    return []


@pytest.fixture
def page(browser: Browser, slow_server: ServerProcess, complaints: list[str]) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    url = slow_server.url
    page.on("request", lambda request: None if request.url.startswith(url) else complaints.append(request.url))
    page.goto(url)
    expect(page.locator("#model")).to_have_text(slow_server.model, timeout=PATIENCE)
    yield page
    page.close()


def pixels(page: Page) -> str:
    return page.evaluate("document.getElementById('blocks').toDataURL()")


def test_a_completion_streams_and_the_map_changes(page: Page, complaints: list[str]) -> None:
    before = pixels(page)
    page.fill("#prompt", "A class definition")
    page.fill("#max-tokens", "400")
    page.click("#send")
    expect(page.locator("#answer")).to_have_text(re.compile(r"\S"), timeout=PATIENCE)
    early = page.locator("#answer").inner_text()
    expect(page.locator("#running")).to_have_text("1", timeout=PATIENCE)
    expect(page.locator("#requests tr")).to_have_count(1, timeout=PATIENCE)
    during = pixels(page)
    expect(page.locator("#timing")).to_contain_text("ended by", timeout=PATIENCE)
    assert len(page.locator("#answer").inner_text()) > len(early)
    assert during != before
    expect(page.locator("#running")).to_have_text("0", timeout=PATIENCE)
    assert int(page.locator("#num-cached").inner_text()) > 0
    assert complaints == []


def test_stop_frees_the_blocks(page: Page, complaints: list[str]) -> None:
    page.fill("#max-tokens", "400")
    page.click("#send")
    expect(page.locator("#answer")).to_have_text(re.compile(r"\S"), timeout=PATIENCE)
    page.click("#stop")
    expect(page.locator("#timing")).to_have_text("stopped")
    expect(page.locator("#running")).to_have_text("0", timeout=PATIENCE)
    expect(page.locator("#num-used")).to_have_text("0", timeout=PATIENCE)
    assert complaints == []


def test_an_error_is_shown(page: Page) -> None:
    page.fill("#max-tokens", "1000000")
    page.click("#send")
    expect(page.locator("#timing")).to_contain_text("maximum context length", timeout=PATIENCE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_light_and_dark(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    for selector, ratio in (("h1", 7), ("dd", 7), ("dt", 4.5), ("#status", 4.5)):  # of WCAG 2: AAA and AA
        assert contrast(page, selector) >= ratio


def contrast(page: Page, selector: str) -> float:
    """Of the first such text to what is behind it, as WCAG 2 defines it."""
    text, back = page.eval_on_selector(
        selector,
        """element => {
            const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
            const solid = (each) => (rgb(getComputedStyle(each).backgroundColor)[3] ?? 1) > 0;
            let behind = element;
            while (!solid(behind)) behind = behind.parentElement;
            return [rgb(getComputedStyle(element).color), rgb(getComputedStyle(behind).backgroundColor)];
        }""",
    )
    lighter, darker = sorted((luminance(text), luminance(back)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(rgb: list[float]) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
        for value in (each / 255 for each in rgb[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_field_has_a_label_and_the_keyboard_reaches_all(page: Page) -> None:
    unlabelled = page.eval_on_selector_all(
        "input, textarea", "fields => fields.filter(field => field.labels.length === 0).map(field => field.id)"
    )
    assert unlabelled == []
    page.focus("#prompt")
    reached = []
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached == ["max-tokens", "temperature", "send", "answer"]
    assert "blocks" in page.get_attribute("#blocks", "aria-label")


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
