"""Tiles and their inverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.steps import StepContext, run_step
from agents.steps.tiling import choose_grid, resize, tile, untile
from sla.errors import InvalidInputError


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (100, 100, (1, 1)),
        (448, 448, (2, 2)),
        (224, 896, (1, 4)),
        (1000, 500, (4, 2)),
        (672, 672, (3, 3)),
        (3000, 60, (7, 1)),
    ],
)
def test_the_grid_follows_the_shape_of_the_picture(height: int, width: int, grid: tuple[int, int]) -> None:
    assert choose_grid(height, width) == grid


@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 5000), width=st.integers(1, 5000), limit=st.integers(1, 16))
def test_a_grid_stays_within_the_limit_and_invents_no_detail(height: int, width: int, limit: int) -> None:
    rows, columns = choose_grid(height, width, side=64, max_tiles=limit)
    assert 1 <= rows * columns <= limit
    assert rows * columns == 1 or rows * columns * 64 * 64 <= 2 * height * width


def test_tiles_without_overlap_give_the_picture_back() -> None:
    whole = picture(96, 64)
    tiles, grid = tile(whole, side=32, max_tiles=12)
    assert grid == (3, 2)
    assert tiles.shape == (7, 32, 32, 3)
    assert np.array_equal(untile(tiles, grid), whole)
    assert np.array_equal(untile(tiles[:-1], grid), whole)
    assert np.array_equal(tiles[-1], resize(whole, 32, 32))


def test_resizing_averages_and_interpolates() -> None:
    even = np.full((50, 70, 3), 77, np.uint8)
    assert np.array_equal(resize(even, 13, 29), np.full((13, 29, 3), 77, np.uint8))
    halves = np.zeros((64, 64, 3), np.uint8)
    halves[:, 32:] = 200
    small = resize(halves, 8, 8)
    assert small[:, :3].max() == 0
    assert small[:, 5:].min() == 200
    noise = picture(256, 256)
    assert abs(float(resize(noise, 16, 16).mean()) - float(noise.mean())) < 3
    assert resize(noise, 16, 16).std() < noise.std() / 4


def test_the_steps_split_and_merge() -> None:
    context = StepContext()
    image = picture(448, 672)
    made = run_step("tiling.split", {"image": image}, context)
    assert made["tiles"].shape == (7, 3, 224, 224)
    assert made["grid"].tolist() == [2, 3]
    merged = run_step("tiling.merge", {"tile_maps": made["tiles"], "grid": made["grid"]}, context)["map"]
    assert np.array_equal(np.rint(merged.transpose(1, 2, 0) * 255).astype(np.uint8), image)


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8)]
)
def test_what_is_no_picture_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(InvalidInputError):
        tile(bad)


def test_maps_that_do_not_fit_their_grid_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="needs 6 tiles"):
        untile(np.zeros((4, 2, 2, 1)), (2, 3))
    with pytest.raises(InvalidInputError, match="'grid'"):
        run_step("tiling.merge", {"tile_maps": np.zeros((1, 1, 2, 2))}, StepContext())
