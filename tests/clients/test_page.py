"""The live page in a browser: Chromium without a window, driven by Playwright."""

import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations, count, pairwise
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
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


@contextmanager
def opened(browser: Browser, server: ServerProcess, complaints: list[str]) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    url = server.url
    page.on("request", lambda request: None if request.url.startswith(url) else complaints.append(request.url))
    page.goto(url)
    expect(page.locator("#model")).to_have_text(server.model, timeout=PATIENCE)
    yield page
    page.close()


@pytest.fixture
def page(browser: Browser, slow_server: ServerProcess, complaints: list[str]) -> Iterator[Page]:
    with opened(browser, slow_server, complaints) as page:
        yield page


@pytest.fixture
def calling_page(browser: Browser, caller: ServerProcess, complaints: list[str]) -> Iterator[Page]:
    """Of a model that thinks and calls a function for Paris, calls it again for Rome, and answers."""
    with opened(browser, caller, complaints) as page:
        page.check("input[value=tools]")
        yield page


def messages_sent(page: Page) -> list[Any]:
    """The messages of each request, as they come."""
    sent: list[Any] = []
    page.on("request", lambda each: sent.append(each.post_data_json["messages"]) if "/v1/" in each.url else None)
    return sent


@contextmanager
def asking(server: ServerProcess, num_prompts: int, **fields: Any) -> Iterator[None]:
    """So many requests at once, and again when they have ended, until the block is left: on a busy machine the page may
    ask for its state later than one round of them takes."""
    prompts = [[i + 5, i + 6, i + 7] for i in range(num_prompts)]
    body = {"prompt": prompts, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    is_left = threading.Event()

    def ask() -> None:
        while not is_left.is_set():
            urllib.request.urlopen(request, timeout=300).read()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


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


def test_a_chat_goes_on_from_what_was_said(page: Page, complaints: list[str]) -> None:
    sent = messages_sent(page)
    page.check("input[value=chat]")
    page.fill("#max-tokens", "8")
    for number in (1, 2):
        page.fill("#prompt", f"Question {number}")
        page.press("#prompt", "Control+Enter")
        expect(page.locator("#answer .user")).to_have_count(number, timeout=PATIENCE)
        expect(page.locator("#timing")).to_contain_text("ended by", timeout=PATIENCE)
        expect(page.locator("#prompt")).to_have_value("")
    first, answer = sent[0], page.locator("#answer .assistant").first.text_content()
    assert first == [{"role": "user", "content": "Question 1"}]
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": "Question 2"}]
    assert answer and sent[1] == first + said
    page.click("#clear")
    assert page.locator("#answer").inner_text() == ""
    assert complaints == []


def test_a_message_that_is_refused_was_not_said(page: Page) -> None:
    page.check("input[value=chat]")
    page.fill("#max-tokens", "1000000")
    page.fill("#prompt", "A question")
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#timing")).to_contain_text("maximum context length", timeout=PATIENCE)
    assert page.locator("#answer p").count() == 0
    assert page.locator("#prompt").input_value() == "A question"


def test_a_chat_with_functions_by_keyboard_on_a_telephone(calling_page: Page, complaints: list[str]) -> None:
    """The results that are typed go back under the ids of their calls."""
    page, sent = calling_page, messages_sent(calling_page)
    page.set_viewport_size({"width": 390, "height": 844})
    page.fill("#max-tokens", "300")
    page.press("#prompt", "Control+Enter")
    schemes: list[Any] = ["light", "dark"]
    for number, (city, scheme) in enumerate(zip(("Paris", "Rome"), schemes, strict=True), start=1):
        label = f'Result of get_weather {{"city": "{city}"}}'
        result = page.get_by_label(label, exact=True)
        expect(result).to_be_focused(timeout=PATIENCE)
        expect(page.locator("#answer .call")).to_have_count(number)
        expect(page.locator("#send")).to_be_disabled()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        page.keyboard.type(f"No rain in {city}")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer .result").nth(number - 1)).to_have_text(
            f"Result of get_weather No rain in {city}", timeout=PATIENCE
        )
    expect(page.locator("#answer .assistant")).to_have_text('{"city": "Rome", "rains": true}', timeout=PATIENCE)
    expect(page.locator("#send")).to_be_enabled(timeout=PATIENCE)
    assert page.locator("#answer .thought").inner_text() == "Thought Perhaps in Paris."
    assert page.locator("#answer .call").first.inner_text() == 'Calls get_weather {"city": "Paris"}'
    user, call, result, *others = sent[-1]
    assert user == {"role": "user", "content": "What is the weather in Paris?"}
    assert call["reasoning_content"] == "Perhaps in Paris." and call["content"] == ""
    [asked] = call["tool_calls"]
    assert asked["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert result == {"role": "tool", "tool_call_id": asked["id"], "content": "No rain in Paris"}
    assert [each["role"] for each in others] == ["assistant", "tool"]
    assert complaints == []


def test_a_call_that_is_cut_off_waits_for_no_result(calling_page: Page) -> None:
    page, sent = calling_page, messages_sent(calling_page)
    page.fill("#max-tokens", "100")  # bytes
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#answer .call")).to_contain_text("cut off", timeout=PATIENCE)
    expect(page.locator("#results-form")).to_be_hidden()
    page.fill("#prompt", "Go on")
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#answer .user")).to_have_count(2, timeout=PATIENCE)
    expect(page.locator("#timing")).to_contain_text("ended by", timeout=PATIENCE)
    assert sent[1][1] == {"role": "assistant", "content": "", "reasoning_content": "Perhaps in Paris."}


def test_each_of_two_calls_has_its_own_result(page: Page) -> None:
    """The arguments are shown as they come, piece by piece."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for index, zone in enumerate("ab"):
        begin = {"index": index, "id": f"call-{zone}", "function": {"name": "get_time", "arguments": ""}}
        deltas.append({"tool_calls": [begin]})
        for text in ('{"zone": ', f'"{zone}"}}'):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    choices = [{"delta": delta} for delta in deltas] + [{"delta": {}, "finish_reason": "tool_calls"}]
    events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="".join(events) + "data: [DONE]\n\n"))
    sent = messages_sent(page)
    page.check("input[value=tools]")
    page.evaluate(
        """() => {
            window.seen = new Set();
            const look = () => window.seen.add(document.querySelector("#answer .call code")?.textContent);
            const changes = { childList: true, characterData: true, subtree: true };
            new MutationObserver(look).observe(document.getElementById("answer"), changes);
        }"""
    )
    page.click("#send")
    for zone in "ba":
        page.get_by_label(f'Result of get_time {{"zone": "{zone}"}}', exact=True).fill(f"noon in {zone}")
    page.click("#results-form button")
    expect(page.locator("#answer .call")).to_have_count(4, timeout=PATIENCE)
    page.unroute_all()
    shown = page.evaluate("[...window.seen].filter((each) => each)")
    assert shown == ['{"zone": ', '{"zone": "a"}']
    _, called, *results = sent[1]
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == ['{"zone": "a"}', '{"zone": "b"}']
    assert [(each["tool_call_id"], each["content"]) for each in results] == [
        ("call-a", "noon in a"),
        ("call-b", "noon in b"),
    ]


def test_wrong_functions_are_shown_at_their_field(page: Page) -> None:
    page.check("input[value=tools]")
    tools, error = page.get_by_label("Functions that the model may call"), page.locator("#tools-error")
    sample = tools.input_value()
    for written, said in (
        ("[{", "This is not JSON: "),
        ('[{"type": "function"}]', "function: expected a value"),
        (sample, "does not write them into the prompt"),  # the demo model
    ):
        tools.fill(written)
        expect(error).to_have_text("")
        page.press("#prompt", "Control+Enter")
        expect(error).to_contain_text(said, timeout=PATIENCE)
        expect(tools).to_be_focused()
        expect(tools).to_have_attribute("aria-invalid", "true")
        assert page.locator("#answer p").count() == 0
    assert page.locator("#prompt").input_value() == "What is the weather in Paris?"
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_colours_of_many_requests_differ(page: Page, slow_server: ServerProcess) -> None:
    """In OKLab, where 0.02 is a difference that can just be seen side by side."""
    with asking(slow_server, 50, max_tokens=100):
        colours = page.wait_for_function(  # all in one look, as the requests may end after it
            """() => {
                const cells = [...document.querySelectorAll("#requests .cell")];
                return cells.length === 50 && cells.map(cell => {
                    const context = new OffscreenCanvas(1, 1).getContext("2d");
                    context.fillStyle = getComputedStyle(cell).backgroundColor;
                    context.fillRect(0, 0, 1, 1);
                    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
                });
            }""",
            timeout=PATIENCE,
        ).json_value()
    assert len(colours) == 50
    assert min(distance(oklab(a), oklab(b)) for a, b in combinations(colours, 2)) > 0.03


def oklab(rgb: list[float]) -> tuple[float, ...]:
    red, green, blue = map(linear, rgb)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def test_the_line_has_an_axis_that_holds_it(page: Page, slow_server: ServerProcess) -> None:
    with asking(slow_server, 1, max_tokens=300):
        most, half, rate = page.wait_for_function(  # all in one look, as they change together
            """() => {
                const [most, half, rate] = ["#rates .most", "#rates .half", "#rate"].map(
                    each => Number(document.querySelector(each).innerText.replaceAll(",", "")));
                return rate > 0 && [most, half, rate];
            }""",
            timeout=PATIENCE,
        ).json_value()
        assert most >= rate and half == most / 2
        places = points(page, "#rates .line")
    assert places[-1][0] == 60 and all(0 <= x <= 60 and 0 <= y <= 2 for x, y in places)
    assert all(earlier[0] < later[0] for earlier, later in pairwise(places))


def points(page: Page, line: str) -> list[tuple[float, ...]]:
    path = page.locator(line).get_attribute("d") or ""
    return [tuple(map(float, point.split(","))) for point in re.findall(r"[-\d.e]+,[-\d.e]+", path)]


def test_the_queue_and_the_latencies_have_lines(page: Page, slow_server: ServerProcess) -> None:
    with asking(slow_server, 2, max_tokens=100):
        for line in ("#queues path.line-0", "#queues path.line-1", "#between-chart .line", "#first-chart .line"):
            expect(page.locator(line)).to_have_attribute("d", re.compile("M"), timeout=PATIENCE)
        label = re.compile("Requests over the last minute, on an axis to [0-9]+; now: running [0-9]+, waiting 0")
        expect(page.locator("#queues svg")).to_have_attribute("aria-label", label, timeout=PATIENCE)


def test_times_are_what_clients_saw(page: Page) -> None:
    """Means of what came since the last poll, of the server's own measures of each request."""
    polls = count(1)

    def metrics(route: Route) -> None:
        poll = next(polls)
        lines = [f"pagedattn:inter_token_latency_seconds_{kind}" for kind in ("count", "sum")]
        lines += [f"pagedattn:time_to_first_token_seconds_{kind}" for kind in ("count", "sum")]
        values = [10 * poll, 2 * poll, poll, 3 * poll]
        route.fulfill(body="".join(f'{n}{{model_name="m"}} {v}.0\n' for n, v in zip(lines, values, strict=True)))

    page.route("**/metrics", metrics)
    expect(page.locator("#between")).to_have_text("200 ms", timeout=PATIENCE)
    expect(page.locator("#first")).to_have_text("3,000 ms", timeout=PATIENCE)
    page.unroute_all()


def test_the_host_pool_takes_no_more_room_than_it_is_used(
    browser: Browser, serve: Callable[..., AbstractContextManager[ServerProcess]]
) -> None:
    options = ("--num-blocks", "64", "--preemption-mode", "swap", "--swap-space", "0.25")
    with serve(*options, program=SLOW_COMMAND) as server:
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.goto(server.url)
        with asking(server, 8, n=4, max_tokens=200):
            expect(page.locator("#host-blocks")).to_be_visible(timeout=PATIENCE)
            height, height_of_all, title = page.evaluate(
                "['host-blocks', 'blocks', 'host'].map(id => document.getElementById(id))"
                ".map((element, i) => i === 2 ? element.innerText : element.clientHeight)"
            )
        page.close()
    used, total = map(int, re.findall(r"\d+", title.replace(",", "")))
    assert 0 < used < total == 64  # as many as the cache has, all of which are drawn
    assert 0 < height < height_of_all


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
    red, green, blue = map(linear, rgb[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(value: float) -> float:
    """Of a channel of sRGB, 0 to 255."""
    return value / 255 / 12.92 if value / 255 <= 0.03928 else ((value / 255 + 0.055) / 1.055) ** 2.4


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


def test_the_map_can_be_read_by_keyboard(page: Page, slow_server: ServerProcess) -> None:
    """The picked block is the map's value, as a screen reader says it."""
    blocks = page.locator("#blocks")
    last = int(blocks.get_attribute("aria-valuemax") or 0)
    with asking(slow_server, 1, max_tokens=400):
        expect(page.locator("#requests tr")).to_have_count(1, timeout=PATIENCE)
        blocks.focus()
        for key, block in (("End", last), ("ArrowRight", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowUp", 0)):
            page.keyboard.press(key)
            expect(blocks).to_have_attribute("aria-valuenow", str(block))
        name = page.locator("#requests td").first.inner_text()
        for _ in range(64):  # to the next block that differs; what requests before have left may lie between
            if (blocks.get_attribute("aria-valuetext") or "").endswith(f": request {name}"):
                break
            page.keyboard.press("PageDown")
        else:
            pytest.fail("no block of the request")
    # In one call: the request ends now, and between two calls the page may hear of it.
    both = "blocks => [document.querySelector('#block').innerText, blocks.getAttribute('aria-valuetext')]"
    shown, said = blocks.evaluate(both)
    assert shown == said
    mark = page.locator("#mark").bounding_box()
    assert mark is not None and mark["width"] > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(page: Page, slow_server: ServerProcess, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.check("input[value=chat]")
    page.focus("#blocks")
    with asking(slow_server, 2, max_tokens=200):
        expect(page.locator("#requests tr")).to_have_count(2, timeout=PATIENCE)
        found = Axe().run(page)
    assert found.response["passes"]
    assert found.violations_count == 0, found.generate_report()


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_tiles_stand_two_abreast_on_a_telephone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    shown = ".figures div:not([hidden])"
    tops = page.eval_on_selector_all(shown, "tiles => tiles.map(tile => tile.getBoundingClientRect().top)")
    assert [tops.count(top) for top in sorted(set(tops))] == [2, 2, 2, 2]
