"""Where tokens lie: their order in compact 3D tiles, and the blocks that are kept whatever is seen.

A video's tokens come row by row and frame by frame. Cut into blocks as they lie, a block is a
strip; attention is local in space and time, so blocks should be compact boxes. Recursive bisection
along the longest side gives boxes of exactly ``block`` tokens on any grid, without padding:
each cut leaves a multiple of the block on one side.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# One step in time counts as this many in space: latent frames are several video frames apart.
FRAME_WEIGHT = 3.0
# A block is a temporal neighbour when it holds this share of the tokens one box further in time.
NEIGHBOUR_SHARE = 0.25
BLOCK = 128
LEAST_BLOCK, LEAST_BLOCKS = 8, 32


@dataclass(frozen=True, eq=False)
class Layout:
    """The token layout of self-attention in one backbone at one size.

    ``grid`` is (frames, rows, columns) of video tokens; a joint model's text tokens come
    ``before`` or ``after`` them in the sequence. ``order`` int64 [N] is the token at each place
    of the block masks: video in tiles, then text. ``text`` bool [blocks] marks blocks that hold
    text, ``always`` bool [blocks, blocks] what every mask keeps: own tile, temporal neighbours,
    and all rows and columns of text. ``centres`` float32 [blocks, 3] are mean grid positions.
    """

    grid: tuple[int, int, int]
    before: int
    after: int
    block: int
    order: Tensor
    text: Tensor
    always: Tensor
    centres: Tensor

    @property
    def tokens(self) -> int:
        return len(self.order)

    @property
    def blocks(self) -> int:
        return len(self.text)

    def per_token(self, video: Tensor) -> Tensor:
        """Values of the grid's tokens [F, H, W], by place of the mask: [blocks, block], and NaN
        where there is text or nothing."""
        flat = video.float().flatten()
        places = torch.full((self.blocks * self.block,), torch.nan)
        count = len(flat)
        places[:count] = flat[self.order[:count] - self.before]
        return places.view(self.blocks, self.block)


def block_for(tokens: int) -> int:
    """The block size for so many tokens: 128, or less so that there are 32 blocks at least."""
    fits = 2 ** int(math.log2(max(1.0, tokens / LEAST_BLOCKS)))
    return max(LEAST_BLOCK, min(BLOCK, fits))


@functools.lru_cache(maxsize=16)
def layout(
    grid: tuple[int, int, int], before: int = 0, after: int = 0, block: int | None = None
) -> Layout:
    """The layout of a grid of video tokens with text tokens before or after it.

    Raises ValueError for sizes that make no sequence.
    """
    video = math.prod(grid)
    tokens = video + before + after
    if min(*grid, before + 1, after + 1) < 1:
        raise ValueError(f"A token grid of {grid} with {before} + {after} text tokens is none.")
    block = block_for(tokens) if block is None else block
    if block < 1:
        raise ValueError(f"The block size is {block}; give 1 or more tokens.")
    positions = np.stack(
        np.meshgrid(*(np.arange(n) for n in grid), indexing="ij"), axis=-1
    ).reshape(-1, 3)
    tiled = _bisected(positions, block)
    words = [*range(before), *range(before + video, tokens)]
    order = torch.from_numpy(np.concatenate([tiled + before, np.array(words, dtype=np.int64)]))
    blocks = -(-tokens // block)
    text = torch.zeros(blocks, dtype=torch.bool)
    if words:
        text[video // block :] = True
    block_of = np.empty(video, dtype=np.int64)
    block_of[tiled] = np.arange(video) // block
    always = _neighbours(positions, block_of, grid, blocks, block)
    always |= torch.eye(blocks, dtype=torch.bool) | text[:, None] | text[None]
    sums = np.zeros((blocks, 3))
    np.add.at(sums, block_of, positions)
    held = np.maximum(np.bincount(block_of, minlength=blocks), 1)
    centres = torch.from_numpy(sums / held[:, None]).float()
    return Layout(grid, before, after, block, order, text, always, centres)


def _bisected(positions: np.ndarray, block: int) -> np.ndarray:
    """Indices of positions [N, 3] such that each run of ``block`` is a compact box."""
    weights = np.array([FRAME_WEIGHT, 1.0, 1.0])
    done: list[np.ndarray] = []
    waiting = [np.arange(len(positions))]
    while waiting:
        part = waiting.pop()
        if len(part) <= block:
            done.append(np.sort(part))
            continue
        own = positions[part]
        sides = (own.max(0) - own.min(0) + 1) * weights
        first, second, third = np.argsort(-sides, kind="stable")
        along = np.lexsort((own[:, third], own[:, second], own[:, first]))
        cut = -(-len(part) // block) // 2 * block
        waiting += [part[along[cut:]], part[along[:cut]]]
    return np.concatenate(done)


def _neighbours(
    positions: np.ndarray, block_of: np.ndarray, grid: tuple[int, int, int], blocks: int, block: int
) -> Tensor:
    """Bool [blocks, blocks]: j holds what i holds, one depth of i earlier or later."""
    frames, area = positions[:, 0], grid[1] * grid[2]
    first, last = np.full(blocks, grid[0]), np.zeros(blocks, dtype=np.int64)
    np.minimum.at(first, block_of, frames)
    np.maximum.at(last, block_of, frames)
    depth = np.maximum(last - first + 1, 1)[block_of]
    token = np.arange(len(positions))
    near = np.zeros((blocks, blocks), dtype=bool)
    for sign in (-1, 1):
        moved = frames + sign * depth
        inside = (moved >= 0) & (moved < grid[0])
        to = block_of[(token + sign * depth * area)[inside]]
        pairs = np.bincount(block_of[inside] * blocks + to, minlength=blocks * blocks)
        near |= pairs.reshape(blocks, blocks) >= NEIGHBOUR_SHARE * block
    return torch.from_numpy(near)
