"""The page at / in a real browser: what it shows, in every state, on every screen."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from tests.browsers import chromium, served
from tests.observations import layer, native_layer, observation

from kv8.engine.snapshot import EngineSnapshot
from kv8.scales.scale import Origin, OriginKind, Scale
from kv8.server import page as kv8_page
from kv8.server.engine_thread import EngineState
from kv8.server.kv_cache import document

PHONE, DESKTOP = {"width": 375, "height": 740}, {"width": 1280, "height": 900}
CLIPPED = [0, 3, 40, 400, 4_000, 40_000, 400_000]  # of a million: one for every colour


def layers(number: int) -> list[Any]:
    made = [layer(i, clipped=(CLIPPED[i % 7], CLIPPED[i // 7 % 7])) for i in range(number)]
    made[-1] = native_layer(number - 1, skipped_by="last:1")
    return made


class Stage:
    """A server that answers /v1/kv_cache as a test wants it to.

    Attributes:
        status: the HTTP status.
        body: the document.
        keys: the Authorization headers that came.
        address: where it is served.
    """

    def __init__(self) -> None:
        self.address = ""
        self.status = 200
        self.body: dict[str, Any] = document(observation(layers(30)))
        self.keys: list[str | None] = []
        self.app = FastAPI()
        self.app.include_router(kv8_page.router())
        self.app.get("/v1/kv_cache")(self.answer)

    def answer(self, request: Request) -> JSONResponse:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse(self.body, self.status)

    def fail(self, status: int, message: str) -> None:
        self.status = status
        self.body = {"error": {"message": message, "type": "x", "param": None, "code": None}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    with served(made.app) as address:
        made.address = address
        yield made


@pytest.fixture
def page(browser: Any, stage: Stage) -> Iterator[Any]:
    """Open the page, and see that nothing went wrong in it and nothing left this machine."""
    context = browser.new_context(viewport=DESKTOP)
    tab = context.new_page()
    troubles: list[str] = []
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on(
        "console",
        lambda said: troubles.append(said.text) if "Content Security" in said.text else None,
    )
    tab.on(
        "request",
        lambda sent: troubles.append(sent.url) if not sent.url.startswith(stage.address) else None,
    )
    tab.goto(stage.address)
    yield tab
    context.close()
    assert troubles == []


def text(tab: Any, selector: str) -> str:
    return " ".join(tab.locator(selector).inner_text().split())


def shown(tab: Any) -> None:
    tab.wait_for_selector("body[data-view=shown]")


def until(tab: Any, selector: str, said: str) -> None:
    tab.locator(selector, has_text=said).wait_for()


def refreshed(tab: Any, stage: Stage) -> None:
    """Wait for the next answer to be shown."""
    before = len(stage.keys)
    for _ in range(100):
        if len(stage.keys) > before + 1:
            return
        tab.wait_for_timeout(100)
    raise AssertionError("the page stopped asking")


def test_the_figures_are_the_documents(page, stage) -> None:
    shown(page)
    assert text(page, "h1") == "smollm2"
    assert text(page, "#state") == "ready"
    assert text(page, "#usage") == "37 %"
    assert text(page, "#used") == "370"
    assert text(page, "#free") == "430"
    assert " ".join(page.title().split()) == "37 % · smollm2 · kv8"
    assert "prefix found 25 %" in text(page, "#work")
    assert "first token after 333 ms since start" in text(page, "#work")
    assert "bytes a token 11,520" in text(page, "#cache")
    assert "fp8_e4m3 in 29 layers, bfloat16 in 1 layer" in text(page, "#cache")
    assert "kv_cache_dtype fp8_e4m3 as asked with fp8" in text(page, "#settings")
    assert "2.00x less memory" in text(page, "#messages")


def test_the_headers_let_nothing_in_from_elsewhere(stage) -> None:
    answer = httpx.get(stage.address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(stage.address, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.head(stage.address).status_code == 200
    assert httpx.get(stage.address + "static/..%2fpage.py").status_code == 404


def test_throughput_is_what_changes_between_two_answers(page, stage) -> None:
    shown(page)
    assert text(page, "#speed") == "–"
    stage.body = {**stage.body, "uptime_seconds": stage.body["uptime_seconds"] + 2}
    stage.body["counters"] = {**stage.body["counters"], "generated_tokens": 1300 + 250}
    until(page, "#speed", "125")
    assert "peak 125" in text(page, "#trace-note")


def test_every_share_has_its_colour(page) -> None:
    shown(page)
    cells = page.locator("#map [data-side=k]")
    levels = [cells.nth(i).get_attribute("data-level") for i in range(30)]
    assert levels[:8] == ["0", "1", "2", "3", "4", "5", "6", "0"]
    assert levels[-1] == "native"
    colours = {
        cells.nth(i).evaluate("cell => getComputedStyle(cell).backgroundColor") for i in range(7)
    }
    assert len(colours) == 7
    assert page.locator("#legend li:visible").count() == 9


def test_a_cell_says_its_scale_and_origin_under_the_pointer(page) -> None:
    shown(page)
    page.hover("#map [data-index='4'][data-side=k]")
    said = text(page, "#readout")
    assert said.startswith("Layer 4 K keys")
    assert "scale 0.0625" in said
    assert "origin checkpoint: layers.4.k_scale" in said
    assert "clipped 0.4 % (4,000)" in said
    assert "became zero 0.0007 % (7)" in said
    page.hover("#map [data-index='29'][data-side=v]")
    assert "none: skipped by last:1" in text(page, "#readout")


def test_and_under_the_keyboard(page, stage) -> None:
    shown(page)
    page.focus("#map [tabindex='0']")
    assert text(page, "#readout").startswith("Layer 6 K keys")  # the first of the worst
    for key, expected in (
        ("ArrowRight", "Layer 7 K"),
        ("ArrowDown", "Layer 7 V"),
        ("ArrowUp", "Layer 7 K"),
        ("End", "Layer 29 K"),
        ("ArrowRight", "Layer 29 K"),
        ("Home", "Layer 0 K"),
        ("ArrowLeft", "Layer 0 K"),
    ):
        page.keyboard.press(key)
        assert text(page, "#readout").startswith(expected), key
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused).startswith("Layer 0, keys: scale 0.0625, origin checkpoint")
    assert page.locator("#map [tabindex='0']").count() == 1
    refreshed(page, stage)
    assert page.evaluate(focused).startswith("Layer 0, keys")  # an update moves nothing


def test_misfits_are_named_and_outlined(page, stage) -> None:
    stage.body = document(
        observation([layer(0, clipped=(20_000, 0)), layer(1), layer(2, clipped=(0, 5))])
    )
    page.reload()
    until(page, "#verdict", "1 of 6 K and V caches clip more than their scale should.")
    assert page.locator("#map [data-misfit]").count() == 1
    page.hover("#map [data-misfit]")
    assert "more than this scale should" in text(page, "#readout")


def test_scales_by_head_and_layers_that_read_others(page, stage) -> None:
    per_head = Scale((0.5, 0.25, 0.125), Origin(OriginKind.FILE, "scales.safetensors"))
    stage.body = document(observation([replace(layer(0), k=per_head), layer(1, reads_layer=0)]))
    page.reload()
    page.wait_for_selector("#map [data-level=reader]")
    assert page.locator("#legend li", has_text="reads another layer's").is_visible()
    assert page.locator("#legend li", has_text="nothing stored").is_hidden()
    page.hover("#map [data-index='0'][data-side=k]")
    assert "scale 0.125 to 0.5 (3 heads)" in text(page, "#readout")
    assert "origin scales file: scales.safetensors" in text(page, "#readout")
    page.hover("#map [data-index='1'][data-side=k]")
    assert "reads layer 0" in text(page, "#readout")


@pytest.mark.parametrize("number", [1, 30, 126])
@pytest.mark.parametrize("viewport", [PHONE, {"width": 320, "height": 600}, DESKTOP])
def test_nothing_is_wider_than_the_screen(page, stage, viewport, number) -> None:
    stage.body = document(observation(layers(number)))
    stage.body["model"] = "/a/very/long/path/" + "without-a-single-blank" * 6
    page.set_viewport_size(viewport)
    page.reload()
    shown(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for cell in (0, number - 1):
        box = page.locator(f"#map [data-index='{cell}'][data-side=v]").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]
        assert box["width"] >= 20


CONTRASTS = """() => {
  const channel = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) =>
    [r, g, b].reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * channel(c / 255), 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(style.color)), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) low.push([walker.currentNode.textContent, ratio]);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", list(EngineState))
def test_every_text_has_the_contrast_of_wcag_aa(page, stage, scheme, state) -> None:
    seen = observation(layers(30), state=state, warnings=("The scales are 1.0.",))
    stage.body = document(seen)
    page.emulate_media(color_scheme=scheme)
    page.reload()
    shown(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(247, 248, 246)" if scheme == "light" else "rgb(15, 19, 21)"
    )
    assert page.evaluate(CONTRASTS) == []


def test_while_the_weights_are_read_the_plan_is_shown(page, stage) -> None:
    plan = [layer(i, k_counts=None, v_counts=None) for i in range(4)]
    planned = EngineSnapshot(report=observation(plan).engine.report)
    stage.body = document(replace(observation([]), state=EngineState.LOADING, engine=planned))
    page.reload()
    until(page, "#state", "loading")
    assert "weights are being read" in text(page, "#notice")
    assert "bytes a token 1,536" in text(page, "#cache")
    assert page.locator("#map [data-level=empty]").count() == 8
    assert page.locator("#empty").is_hidden()


def test_before_the_first_request_it_says_how_to_send_one(page, stage) -> None:
    nothing = [layer(i, k_counts=None, v_counts=None) for i in range(4)]
    fresh = EngineSnapshot(report=observation(nothing).engine.report)
    stage.body = document(replace(observation([]), engine=fresh))
    page.reload()
    page.wait_for_selector("#empty:not([hidden])")
    assert f"curl {stage.address}v1/completions" in text(page, "#example")
    assert text(page, "#verdict") == "Nothing is stored yet."
    assert text(page, "#clipped") == "–"
    assert page.locator("#map [data-level=empty]").count() == 8


def test_a_cache_that_is_not_quantized_clips_nothing(page, stage) -> None:
    stage.body = document(observation([native_layer(0), native_layer(1)]))
    page.reload()
    until(page, "#verdict", "The cache keeps the model's own dtype: nothing is clipped.")
    assert page.locator("#map [data-level=native]").count() == 4


def test_a_failure_is_told_with_its_reason(page, stage) -> None:
    stage.body = document(observation(layers(30), state=EngineState.FAILED))
    until(page, "#state", "failed")
    assert text(page, "#notice") == "The engine has failed: RuntimeError: the disk is on fire"
    assert text(page, "#usage") == "37 %"  # the last that was seen of it


def test_an_error_is_told_in_the_servers_words(page, stage) -> None:
    stage.fail(500, "Something broke.")
    page.reload()
    page.wait_for_selector("#notice:not([hidden])")
    assert text(page, "#notice") == "The server answered 500: Something broke."


def test_a_server_that_is_gone_is_told_apart_from_one_that_is_idle(browser) -> None:
    context = browser.new_context()
    tab = context.new_page()
    stage = Stage()
    with served(stage.app) as address:
        tab.goto(address)
        shown(tab)
    tab.wait_for_selector("#notice:not([hidden])")
    assert text(tab, "#state") == "no answer"
    assert text(tab, "#notice").startswith("The server cannot be reached. The numbers below are of")
    assert text(tab, "#usage") == "37 %"
    context.close()


def test_it_asks_for_the_api_key_once_and_sends_it(page, stage) -> None:
    body = stage.body
    stage.fail(401, "Incorrect API key provided.")
    page.wait_for_selector("#lock:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert text(page, "#notice") == "The server refused that key."
    stage.status, stage.body = 200, body
    page.fill("#key", "secret")
    page.click("#lock button")
    shown(page)
    page.wait_for_selector("#lock", state="hidden")
    assert stage.keys[-1] == "Bearer secret"
    assert "Bearer wrong" in stage.keys


def test_markup_in_names_stays_text(page, stage) -> None:
    stage.body = document(observation([layer(0)]))
    stage.body["model"] = "<img src=x onerror=alert(1)><b>model</b>"
    stage.body["messages"] = ["<script>alert(1)</script>"]
    page.reload()
    until(page, "h1", "<img")
    assert page.locator("h1 *, #messages li *").count() == 0


def test_on_a_phone_what_a_cell_says_stays_in_sight_and_hides_no_cell_for_good(page, stage) -> None:
    stage.body = document(observation(layers(96)))
    page.set_viewport_size(PHONE)
    page.reload()
    shown(page)
    page.locator("#map [data-index='0'][data-side=k]").scroll_into_view_if_needed()
    page.locator("#map-title").evaluate("title => title.scrollIntoView()")
    page.click("#map [data-index='2'][data-side=k]")
    box = page.locator("#readout").bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"] + 1
    page.locator("#cache-title").scroll_into_view_if_needed()
    last = page.locator("#map [data-index='95'][data-side=v]").bounding_box()
    assert last["y"] + last["height"] <= page.locator("#readout").bounding_box()["y"]
