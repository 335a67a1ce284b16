"""Recognising a backbone by its build, not by its file name, and how it lays out its tokens.

The layouts describe what an observer of attention calls meets: which calls of a forward pass are
self-attention over the video, and where in their sequences the video tokens are. Trajectory reuse
needs none of this; a backbone without a layout goes without scope tiles and connectivity.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Shapes = Mapping[str, Sequence[int]]


def architecture(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """A short hash of all parameter names and shapes of a diffusion model.

    Fine-tunes, merges and quantised copies of one architecture share it; it says which risk table
    applies and which records can be donors.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, shape in sorted((name, tuple(shape)) for name, shape in shapes):
        digest.update(f"{name}:{','.join(map(str, shape))};".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenLayout:
    """The attention calls of one forward pass of a video diffusion transformer.

    ``channels`` counts those of the latents it denoises, ``patch`` how many latent frames, rows
    and columns make a token. Tokens run through columns first, then rows, then frames. ``text``
    says where text tokens stand in the sequences of self-attention: nowhere, before the video
    tokens, or after them. ``split_heads`` is True where q, k, v come as [B, heads, N, head_dim]
    and False for [B, N, heads * head_dim].

    A pass makes ``before`` calls over text alone, and then ``calls`` for each of its ``layers``,
    of which the first is self-attention and the others are cross-attention.
    """

    name: str
    channels: int
    patch: tuple[int, int, int]
    heads: int
    head_dim: int
    layers: int
    text: Literal["none", "first", "last"] = "none"
    split_heads: bool = False
    before: int = 0
    calls: int = 1

    def grid(self, latent: Sequence[int]) -> tuple[int, int, int]:
        """Tokens (frames, rows, columns) of a latent of shape [B, C, F, H, W]; a patch that is
        not full is padded."""
        frames, rows, columns = (
            math.ceil(n / p) for n, p in zip(latent[2:], self.patch, strict=True)
        )
        return frames, rows, columns

    def layer_of(self, call: int) -> int | None:
        """The layer whose self-attention the ``call``-th attention call of a forward pass is,
        both counted from 0; None for calls over text and for cross-attention."""
        layer, part = divmod(call - self.before, self.calls)
        return layer if 0 <= layer < self.layers and part == 0 else None

    def video_tokens(self, length: int, latent: Sequence[int]) -> slice | None:
        """Where the video tokens of a latent [B, C, F, H, W] stand in a self-attention sequence
        of ``length`` tokens; None when it cannot be such a sequence.

        Tokens of reference images stand between the text and the video and count as text.
        """
        tokens = math.prod(self.grid(latent))
        if length < tokens or (length > tokens and self.text == "none"):
            return None
        start = length - tokens if self.text == "first" else 0
        return slice(start, start + tokens)


def layout_of(shapes: Shapes, heads: int | None = None) -> TokenLayout | None:
    """The layout of a diffusion model from the names and shapes of its parameters, without a
    prefix; None for a family that is not known here.

    Wan and LTX-Video normalise all heads together, so that no shape tells how many there are.
    ``heads`` does; without it, heads are taken to be those of published models (128 channels each
    in Wan, 32 of them in LTX-Video).
    """
    for detect in DETECTORS:
        try:
            found = detect(shapes)
        except (KeyError, ValueError, ZeroDivisionError, StopIteration):  # another build
            continue
        if found is not None and heads:
            width = found.heads * found.head_dim
            return replace(found, heads=heads, head_dim=width // heads)
        if found is not None:
            return found
    return None


def _count(shapes: Shapes, prefix: str) -> int:
    """Number of blocks in a list of blocks: "blocks." counts blocks.0., blocks.1., ..."""
    start = len(prefix)
    return len({name[start:].split(".")[0] for name in shapes if name.startswith(prefix)})


def _any(shapes: Shapes, *prefixes: str) -> bool:
    return any(name.startswith(prefixes) for name in shapes)


# Parts of variants with more attention, or more tokens, than the layout of plain Wan says.
WAN_VARIANTS = (
    "vace_",
    "casual_audio_encoder.",
    "audio_proj.",
    "face_adapter.",
    "patch_embedding_mask.",
    "patch_embedding_pose.",
    "patch_embedding_global.",
)


def _wan(shapes: Shapes) -> TokenLayout | None:
    """Wan 2.1 and 2.2 (arXiv:2503.20314), text to video and image to video."""
    if "head.modulation" not in shapes or _any(shapes, *WAN_VARIANTS):
        return None
    dim, patch = shapes["head.modulation"][-1], tuple(shapes["patch_embedding.weight"][2:])
    heads = dim // 128
    channels = shapes["head.head.weight"][0] // math.prod(patch)
    name = "Wan 2.2 5B" if channels == 48 else "Wan"
    pictures = "blocks.0.cross_attn.k_img.weight" in shapes
    frames, rows, columns = patch
    return TokenLayout(
        name,
        channels,
        (frames, rows, columns),
        heads,
        dim // heads,
        _count(shapes, "blocks."),
        calls=3 if pictures else 2,
    )


def _hunyuan(shapes: Shapes) -> TokenLayout | None:
    """HunyuanVideo (arXiv:2412.03603) and HunyuanVideo 1.5: all tokens in one sequence."""
    if "txt_in.individual_token_refiner.blocks.0.norm1.weight" not in shapes:
        return None
    dim, _, *patch = shapes["img_in.proj.weight"]
    if len(patch) != 3:
        return None  # HunyuanImage
    norms = "double_blocks.0.img_attn.norm.query_norm."  # the host renamed its weight once
    head_dim = next(shape[0] for name, shape in shapes.items() if name.startswith(norms))
    later = _any(shapes, "cond_type_embedding.", "vision_in.")
    return TokenLayout(
        "HunyuanVideo 1.5" if later else "HunyuanVideo",
        shapes["final_layer.linear.weight"][0] // math.prod(patch),
        (patch[0], patch[1], patch[2]),
        dim // head_dim,
        head_dim,
        _count(shapes, "double_blocks.") + _count(shapes, "single_blocks."),
        text="first",
        split_heads=True,
        before=_count(shapes, "txt_in.individual_token_refiner.blocks."),
    )


def _ltx(shapes: Shapes) -> TokenLayout | None:
    """LTX-Video (arXiv:2501.00103), without the variants that make sound."""
    if "adaln_single.emb.timestep_embedder.linear_1.bias" not in shapes or _any(
        shapes, "audio_", "video_embeddings_connector.", "pos_embed."
    ):
        return None
    dim, channels = shapes["patchify_proj.weight"]
    heads = 32
    layers = _count(shapes, "transformer_blocks.")
    return TokenLayout("LTX-Video", channels, (1, 1, 1), heads, dim // heads, layers, calls=2)


def _mochi(shapes: Shapes) -> TokenLayout | None:
    """Mochi 1 preview: text tokens after the video tokens, padding left out."""
    if "t5_yproj.weight" not in shapes:
        return None
    _, heads, half = shapes["pos_frequencies"]
    _, channels, rows, columns = shapes["x_embedder.proj.weight"]
    return TokenLayout(
        "Mochi",
        channels,
        (1, rows, columns),
        heads,
        2 * half,
        _count(shapes, "blocks."),
        text="last",
        split_heads=True,
    )


def _cogvideox(shapes: Shapes) -> TokenLayout | None:
    """CogVideoX (arXiv:2408.06072) 1.0, and 1.5 with patches of two frames."""
    if "blocks.0.norm1.linear.weight" not in shapes:
        return None
    dim, head_dim = shapes["norm_final.weight"][0], shapes["blocks.0.norm_q.weight"][0]
    embedding = shapes["patch_embed.proj.weight"]
    later = len(embedding) == 2
    patch = (2, 2, 2) if later else (1, embedding[2], embedding[3])
    return TokenLayout(
        "CogVideoX 1.5" if later else "CogVideoX",
        shapes["proj_out.weight"][0] // math.prod(patch),
        patch,
        dim // head_dim,
        head_dim,
        _count(shapes, "blocks."),
        text="first",
    )


def _cosmos(shapes: Shapes) -> TokenLayout | None:
    """Cosmos Predict2, without Anima, which is made of it and makes pictures."""
    if "blocks.0.mlp.layer1.weight" not in shapes or _any(shapes, "llm_adapter."):
        return None
    dim, head_dim = (
        shapes["x_embedder.proj.1.weight"][0],
        shapes["blocks.0.self_attn.q_norm.weight"][0],
    )
    return TokenLayout(
        "Cosmos Predict2",
        shapes["final_layer.linear.weight"][0] // 4,
        (1, 2, 2),
        dim // head_dim,
        head_dim,
        _count(shapes, "blocks."),
        split_heads=True,
        calls=2,
    )


def _kandinsky(shapes: Shapes) -> TokenLayout | None:
    """Kandinsky 5: text goes through blocks of its own before cross-attention."""
    if "visual_transformer_blocks.0.cross_attention.key_norm.weight" not in shapes:
        return None
    dim = shapes["visual_embeddings.in_layer.weight"][0]
    head_dim = shapes["visual_transformer_blocks.0.self_attention.query_norm.weight"][0]
    return TokenLayout(
        "Kandinsky 5",
        shapes["out_layer.out_layer.weight"][0] // 4,
        (1, 2, 2),
        dim // head_dim,
        head_dim,
        _count(shapes, "visual_transformer_blocks."),
        split_heads=True,
        before=_count(shapes, "text_transformer_blocks."),
        calls=2,
    )


DETECTORS: tuple[Callable[[Shapes], TokenLayout | None], ...] = (
    _wan,
    _hunyuan,
    _ltx,
    _mochi,
    _cogvideox,
    _cosmos,
    _kandinsky,
)
