"""Makes docs/live-map.png: serves the default model to three tenants who ask for more than there is
room for, looks at the live map in Chromium, chooses a slot, and keeps what is seen.

    PYTHONPATH=src python scripts/picture_live_map.py [--port 9449] [--seconds 25] [--out FILE]

Needs `chromium` on the path, and Pillow for the palette (`make install` brings it).
"""

from __future__ import annotations

import argparse
import io
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from e2e.browser import Browser  # noqa: E402

TENANTS = """
[tenants.operator]
keys = ["operator"]
admin = true
[tenants.atlas]
keys = ["atlas"]
weight = 2.0
[tenants.borealis]
keys = ["borealis"]
[tenants.corvus]
keys = ["corvus"]
"""
USERS = ("atlas", "atlas", "borealis", "corvus")
FLAGS = ("--num-pages", "640", "--max-num-seqs", "24", "--log-level", "warning")
COLOURS, CUT = 128, 990
"""Of the picture: how many, and the height in pixels; it is to be small."""


def ask(url: str, number: int, end: float) -> None:
    """One user, who asks again and again. Half of the prompts of a tenant begin alike."""
    key, rng = USERS[number % len(USERS)], random.Random(number)
    while time.monotonic() < end:
        stem = [500 + len(key)] * rng.choice([0, 0, 96, 160])
        body = {
            "prompt": stem + rng.choices(range(1000, 20000), k=rng.randint(20, 300)),
            "max_tokens": rng.randint(40, 300),
            "ignore_eos": True,
            "n": rng.choice([1, 1, 1, 2]),
        }
        headers = {"authorization": f"Bearer {key}"}
        try:
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
        except httpx.TransportError:
            return  # the picture is taken, and the server gone


def look(url: str, seconds: float) -> bytes:
    """The map after a while, with a page table lit."""
    with Browser() as browser:
        size = {"width": 1280, "height": 880, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **size)
        browser.open(url)
        browser.until("!document.getElementById('key-form').hidden")
        browser.ask("document.getElementById('key').value = 'operator'")
        browser.ask("document.querySelector('#key-form button').click()")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            browser.ask("1")  # reads what the browser says meanwhile
            time.sleep(0.2)
        slots = "[...document.querySelectorAll('.slot:enabled')]"
        pages = "Number(/(\\d+) pages/.exec(slot.textContent)?.[1] ?? 0)"
        browser.ask(f"{slots}.find((slot) => {pages} > 17).click()")
        time.sleep(0.5)
        return browser.picture()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--port", type=int, default=9449)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--users", type=int, default=36)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/live-map.png")
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        tenants.write_text(TENANTS)
        serve = [sys.executable, "-m", "turnstile", "serve", "--port", str(options.port)]
        server = subprocess.Popen([*serve, "--tenants", str(tenants), *FLAGS])
        try:
            while not _ready(url):
                time.sleep(0.2)
            end = time.monotonic() + options.seconds + 10
            for number in range(options.users):
                threading.Thread(target=ask, args=(url, number, end), daemon=True).start()
            picture = look(url, options.seconds)
        finally:
            server.terminate()
            server.terminate()
            server.wait()
    with Image.open(io.BytesIO(picture)) as image:
        top = image.convert("RGB").crop((0, 0, image.width, min(image.height, CUT)))
        small = top.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
        small.save(options.out, optimize=True)
    print(f"{options.out}: {options.out.stat().st_size} bytes")


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
