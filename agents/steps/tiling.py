"""Pictures larger than a model's input, as tiles: the way vision-language models read high resolutions.

The picture is resized to the grid of tiles that keeps its shape best, cut into tiles that do not overlap, and followed by a thumbnail of the
whole, so that a model sees both detail and layout. Tiles are items of the patch axis: they may be split over devices. `untile` puts
what a model made of the tiles together again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from agents.steps import StepContext
from sla.errors import InvalidInputError

MAX_TILES = 12
"""Without the thumbnail; today's models use 4 to 40."""
TILE_SIDE = 224
_MAX_SIDE = 16_384


def choose_grid(height: int, width: int, *, side: int = TILE_SIDE, max_tiles: int = MAX_TILES) -> tuple[int, int]:
    """(rows, columns) of at most `max_tiles` tiles whose shape is closest to the picture's; of two alike the one that loses less detail.

    A grid never has more pixels than twice those of the picture: enlarging adds tiles but no detail.
    """
    best, best_key = (1, 1), (math.inf, 0.0)
    for rows in range(1, max_tiles + 1):
        for columns in range(1, max_tiles // rows + 1):
            if rows * columns > 1 and rows * columns * side * side > 2 * height * width:
                continue
            misfit = abs(math.log((columns / rows) / (width / height)))
            kept = min(rows * columns * side * side, height * width)
            key = (round(misfit, 6), -float(kept))
            if key < best_key:
                best, best_key = (rows, columns), key
    return best


def tile(
    picture: np.ndarray, *, side: int = TILE_SIDE, max_tiles: int = MAX_TILES
) -> tuple[np.ndarray, tuple[int, int]]:
    """Tiles [rows x columns + 1, side, side, 3] in reading order with the thumbnail last, and the grid.

    `picture` is uint8 [H, W, 3]. A picture of one tile is its own thumbnail and has just that. Raises InvalidInputError for others.
    """
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise InvalidInputError(
            f"A picture to be tiled is uint8 [height, width, 3], not {picture.dtype} {list(picture.shape)}.",
            pointer="/inputs", found=f"{picture.dtype} {list(picture.shape)}", accepted="uint8 [height, width, 3]",
        )  # fmt: skip
    height, width = picture.shape[:2]
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE):
        raise InvalidInputError(
            f"A picture to be tiled has sides of 1 to {_MAX_SIDE} pixels, not {width} x {height}.", pointer="/inputs"
        )
    rows, columns = choose_grid(height, width, side=side, max_tiles=max_tiles)
    thumbnail = resize(picture, side, side)[None]
    if rows * columns == 1:
        return thumbnail, (1, 1)
    large = resize(picture, rows * side, columns * side)
    tiles = large.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    return np.concatenate([tiles, thumbnail]), (rows, columns)


def untile(tiles: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """What a model made of the tiles, [rows x columns (+ 1), h, w, channels], as one map [rows x h, columns x w, channels].

    The last item, the thumbnail's, is left out. Raises InvalidInputError if the number of items does not fit the grid.
    """
    rows, columns = grid
    count = rows * columns
    if tiles.ndim != 4 or rows < 1 or columns < 1 or len(tiles) not in (count, count + 1):
        raise InvalidInputError(
            f"A grid of {rows} x {columns} needs {count} tiles and perhaps a thumbnail, each [h, w, channels]; found {list(tiles.shape)}."
        )
    _, h, w, channels = tiles.shape
    ordered = tiles[:count].reshape(rows, columns, h, w, channels).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(ordered.reshape(rows * h, columns * w, channels))


def resize(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3] at another size; averages what it makes smaller, interpolates what it makes larger."""
    if picture.shape[:2] == (height, width):
        return picture
    shrunk = _apply(_weights(picture.shape[0], height), picture.astype(np.float32))
    across = _apply(_weights(picture.shape[1], width), shrunk.transpose(1, 0, 2)).transpose(1, 0, 2)
    rounded: np.ndarray = np.clip(np.rint(across), 0, 255).astype(np.uint8)
    return rounded


def _weights(source: int, target: int) -> list[tuple[int, np.ndarray]]:
    """For each target row: the first source row it reads, and the weights of the rows from there (a triangle filter)."""
    scale = source / target
    reach = max(scale, 1.0)
    rows = []
    for at in range(target):
        centre = (at + 0.5) * scale - 0.5
        first, last = max(0, math.ceil(centre - reach)), min(source - 1, math.floor(centre + reach))
        weights = np.maximum(0.0, 1.0 - np.abs(np.arange(first, last + 1) - centre) / reach)
        rows.append((first, (weights / weights.sum()).astype(np.float32)))
    return rows


def _apply(rows: list[tuple[int, np.ndarray]], values: np.ndarray) -> np.ndarray:
    return np.stack([np.tensordot(weights, values[first : first + len(weights)], 1) for first, weights in rows])


def split(tensors: Mapping[str, np.ndarray], context: StepContext) -> dict[str, np.ndarray]:
    """Step `tiling.split`: `image` uint8 [H, W, 3] -> `tiles` float32 [T, 3, side, side] in [0, 1] and `grid` int64 [2]."""
    tiles, grid = tile(_need(tensors, "image"))
    scaled = np.ascontiguousarray(tiles.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
    return {"tiles": scaled, "grid": np.array(grid, np.int64)}


def merge(tensors: Mapping[str, np.ndarray], context: StepContext) -> dict[str, np.ndarray]:
    """Step `tiling.merge`: `tile_maps` [T, channels, h, w] and `grid` -> `map` [channels, rows x h, columns x w]."""
    maps, grid = _need(tensors, "tile_maps"), _need(tensors, "grid")
    if maps.ndim != 4 or grid.shape != (2,):
        raise InvalidInputError(f"Maps of tiles are [T, channels, h, w] with a grid [2]; found {list(maps.shape)}.")
    merged = untile(maps.transpose(0, 2, 3, 1), (int(grid[0]), int(grid[1])))
    return {"map": np.ascontiguousarray(merged.transpose(2, 0, 1))}


def _need(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in tensors:
        raise InvalidInputError(f"Tiling needs the tensor {name!r}.", found=", ".join(tensors), accepted=name)
    return tensors[name]
