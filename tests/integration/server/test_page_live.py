"""The page of a real server at work; ``--update-golden`` takes the pictures in the docs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.browsers import chromium
from tests.served import serving

from kv8.calibration.start_up import start_engine

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "images"
PHONE = {"width": 390, "height": 844}
PREFACE = "Below is the beginning of a text. Go on with it in the same language and manner. "
PROMPTS = (
    "London is the capital of",
    "The three laws of thermodynamics are",
    "def quicksort(items):",
    "Dear Sir or Madam,\n\nI am writing to",
)


@pytest.mark.model
def test_the_page_of_a_server_at_work(update_golden) -> None:
    options = {"kv_cache_dtype": "fp8", "kv_cache_memory": "64MiB"}
    if update_golden:  # a server as people run it, with enough to do for a picture
        options["calculate_kv_scales"] = True
    num_clients, length = (8, 64) if update_golden else (2, 16)
    with chromium() as browser, serving("smollm2", make_engine=start_engine, **options) as server:
        page = browser.new_page(viewport={"width": 1200, "height": 900}, device_scale_factor=1.25)
        page.goto(server.url)
        page.wait_for_selector("#empty:not([hidden])")
        enough = threading.Event()

        def ask(number: int) -> None:
            with server.client() as client:
                while not enough.is_set():
                    prompt = f"{PREFACE}Number {number}. {PROMPTS[number % len(PROMPTS)]}"
                    body = {"prompt": prompt, "max_tokens": length, "temperature": 0.8}
                    client.post("/v1/completions", json=body).raise_for_status()

        with ThreadPoolExecutor(num_clients) as clients:
            asked = [clients.submit(ask, number) for number in range(num_clients)]
            try:
                page.locator("#trace-note", has_text="peak").wait_for()  # tokens were generated
                cells = page.locator("#map [data-level]")
                assert cells.count() == 60
                empty = '#map [data-level="empty"], #map [data-level="native"]'
                page.wait_for_function(f"!document.querySelector('{empty}')")
                assert "running" in page.inner_text("#work")
                if update_golden:
                    page.wait_for_timeout(40_000)
                    PICTURES.mkdir(exist_ok=True)
                    page.screenshot(path=PICTURES / "page.png", full_page=True)
                    page.emulate_media(color_scheme="dark")
                    page.set_viewport_size(PHONE)
                    page.locator("#map-title").evaluate("title => title.scrollIntoView()")
                    page.screenshot(path=PICTURES / "page-phone.png")
            finally:
                enough.set()
        for future in asked:
            future.result()
