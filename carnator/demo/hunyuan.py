"""A plain-torch HunyuanVideo diffusion transformer that reads the host's own checkpoint format.

The architecture is that of HunyuanVideo (Kong et al., arXiv:2412.03603) without the guidance
embedding: a refiner for the text tokens, double-stream blocks in which text and video tokens keep
weights of their own but attend jointly (MM-DiT, arXiv:2403.03206), then single-stream blocks with
attention and feed-forward in parallel. All blocks are modulated by the sum of the embeddings of
time and pooled text. Parameter names follow the checkpoints that ComfyUI's loader takes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hunyuan_layers import (
    HEAD_DIM,
    DoubleBlock,
    Embedder,
    FinalLayer,
    Observe,
    SingleBlock,
    TextRefiner,
    constant_table,
)
from .wan import TIME_FEATURES, TIMESTEPS, timestep_features

POOLED_DIM = 768  # width of the pooled text vector; the host knows no other
PARTS = {
    "img_in", "time_in", "vector_in", "txt_in", "double_blocks", "single_blocks", "final_layer",
}  # fmt: skip


@dataclass(frozen=True)
class HunyuanConfig:
    """Sizes of a HunyuanVideo transformer. ``hidden`` must be a multiple of 128, the head's size;
    ``text_dim`` at most 768, since the pooled text vector is that wide."""

    hidden: int = 128
    double_blocks: int = 2
    single_blocks: int = 2
    text_dim: int = 64
    channels: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)

    def __post_init__(self) -> None:
        if self.hidden < HEAD_DIM or self.hidden % HEAD_DIM:
            raise ValueError(f"hidden must be a multiple of {HEAD_DIM}, not {self.hidden}.")
        if not 1 <= self.text_dim <= POOLED_DIM:
            raise ValueError(f"text_dim must be from 1 to {POOLED_DIM}, not {self.text_dim}.")

    def host_config(self) -> dict:
        """Empty: the host reads all sizes of this family off the tensor shapes."""
        return {}

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_checkpoint(cls, state: dict[str, Tensor], metadata: dict[str, str]) -> HunyuanConfig:
        """Sizes of a checkpoint, from the shapes of its tensors; ``metadata`` is not needed.

        Raises KeyError or ValueError for a checkpoint of another family or variant.
        """
        parts = {name.split(".")[0] for name in state}
        if parts != PARTS:
            wrong = ", ".join(sorted(parts ^ PARTS)[:4])
            raise ValueError(
                f"not a HunyuanVideo transformer without guidance embedding: {wrong} missing or "
                "unknown"
            )
        patches = state["img_in.proj.weight"]
        if patches.ndim != 5 or state["vector_in.in_layer.weight"].shape[1] != POOLED_DIM:
            raise ValueError("not a HunyuanVideo transformer for clips with a pooled text vector")

        def depth(part: str) -> int:
            return len({name.split(".")[1] for name in state if name.startswith(part)})

        return cls(
            hidden=patches.shape[0],
            double_blocks=depth("double_blocks."),
            single_blocks=depth("single_blocks."),
            text_dim=state["txt_in.input_embedder.weight"].shape[1],
            channels=patches.shape[1],
            patch=(patches.shape[2], patches.shape[3], patches.shape[4]),
        )


def pooled_text(text: Tensor) -> Tensor:
    """The pooled vector [B, 768] of text tokens [B, L, D]: their mean, padded with zeros."""
    return F.pad(text.mean(1), (0, POOLED_DIM - text.shape[-1]))


class HunyuanTransformer(nn.Module):
    """Predicts the flow velocity ``noise - clean`` of a video latent."""

    def __init__(self, config: HunyuanConfig):
        super().__init__()
        c = self.config = config
        self.img_in = nn.ModuleDict({"proj": nn.Conv3d(c.channels, c.hidden, c.patch, c.patch)})
        self.time_in = Embedder(TIME_FEATURES, c.hidden)
        self.vector_in = Embedder(POOLED_DIM, c.hidden)
        self.txt_in = TextRefiner(c.text_dim, c.hidden)
        self.double_blocks = nn.ModuleList(DoubleBlock(c.hidden) for _ in range(c.double_blocks))
        self.single_blocks = nn.ModuleList(SingleBlock(c.hidden) for _ in range(c.single_blocks))
        self.final_layer = FinalLayer(c.hidden, c.channels, c.patch)

    def forward(
        self, x: Tensor, sigma: Tensor, text: Tensor, observe: Observe | None = None
    ) -> Tensor:
        """Velocity of latents x [B, C, F, H, W] at noise levels sigma [B] in 0..1.

        ``text`` is [B, L, text_dim]; F, H, W must be multiples of the patch. ``observe(layer, q,
        k, v, out)`` is called for every joint attention, double blocks first, with q, k, v
        [B, H, L + N, D] and its output [B, L + N, C], text tokens before video tokens.
        """
        c = self.config
        img = self.img_in["proj"](x)
        grid = tuple(img.shape[2:])
        img = img.flatten(2).transpose(1, 2)
        time = timestep_features(sigma * TIMESTEPS)
        # Every user of the conditioning vector applies SiLU to it first: once is enough.
        vector = F.silu(self.time_in(time) + self.vector_in(pooled_text(text)))
        txt = self.txt_in(text, time)
        length = txt.shape[1]
        table = constant_table(length, grid).to(x.device)
        see = [
            None if observe is None else partial(observe, i)
            for i in range(c.double_blocks + c.single_blocks)
        ]
        for block, watch in zip(self.double_blocks, see, strict=False):
            img, txt = block(img, txt, vector, table, watch)
        h = torch.cat([txt, img], 1)
        for block, watch in zip(self.single_blocks, see[c.double_blocks :], strict=True):
            h = block(h, vector, table, watch)
        h = self.final_layer(h[:, length:], vector)
        h = h.unflatten(1, grid).unflatten(-1, (c.channels, *c.patch))
        h = h.permute(0, 4, 1, 5, 2, 6, 3, 7)  # B C F f H r W w
        return h.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def initialise(self, seed: int) -> None:
        """Seeded weights for training: the output starts at zero, the modulation small."""
        torch.manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.constant_(p, float("norm" in name and name.endswith("weight")))
            elif "mod" in name:  # img_mod, txt_mod, modulation, adaLN_modulation
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
        nn.init.zeros_(self.final_layer.linear.weight)

    def matrices(self) -> list[nn.Parameter]:
        """The matrices of the blocks, except the modulation: what Muon trains."""
        return [
            p
            for name, p in self.named_parameters()
            if p.ndim == 2 and "blocks." in name and "mod" not in name
        ]
