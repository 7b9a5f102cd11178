"""Pillow: images in several formats, of several pages, and rewritten in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.libraries.programs.frame import main

PIXELS = np.random.default_rng(6).integers(0, 255, (6, 120, 160, 3), dtype=np.uint8)


def write(top: Path) -> None:
    pages = [Image.fromarray(page) for page in PIXELS]
    for suffix in ("png", "bmp", "tiff", "ppm"):
        pages[0].save(top / f"image.{suffix}")
    pages[0].save(top / "image.jpeg", quality=90)
    pages[0].save(top / "pages.tiff", save_all=True, append_images=pages[1:])
    for step, page in enumerate(pages):
        page.save(top / "latest.png")
        page.save(top / f"sample-{step:03}.png", optimize=True)


def check(top: Path) -> None:
    for suffix in ("png", "bmp", "tiff", "ppm"):
        with Image.open(top / f"image.{suffix}") as image:
            assert np.array_equal(np.asarray(image), PIXELS[0]), suffix
    with Image.open(top / "image.jpeg") as image:
        image.load()
        assert image.size == (160, 120)
    with Image.open(top / "pages.tiff") as image:
        for number, page in enumerate(PIXELS):
            image.seek(number)
            assert np.array_equal(np.asarray(image), page)
    for number, page in enumerate(PIXELS):
        with Image.open(top / f"sample-{number:03}.png") as image:
            assert np.array_equal(np.asarray(image), page)
    with Image.open(top / "latest.png") as image:
        assert np.array_equal(np.asarray(image), PIXELS[-1])


if __name__ == "__main__":
    main(write, check)
