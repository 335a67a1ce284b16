"""Very small models with random weights, in the host's own classes and checkpoint formats.

Each is written to a file and loaded by the host's own loader, so that what the host puts around a
model of the family (latent format, conditions, schedule) is the real thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import torch
from comfy.nested_tensor import NestedTensor
from safetensors.torch import save_file

WIDTH = 64  # of text embeddings


@dataclass(frozen=True)
class Family:
    """``home`` and ``name`` locate the host's class, ``sizes`` are its arguments. ``latent`` is the
    shape of a small empty latent; ``config`` goes into the file's metadata where the host's
    detection reads it from there."""

    home: str
    name: str
    sizes: dict[str, Any]
    latent: tuple[int, ...]
    config: dict[str, Any] | None = None
    text: int = WIDTH
    extra: Callable[[], dict[str, Any]] = dict
    audio: tuple[int, ...] = ()  # the shape of the audio latent beside the video's


def wan(**changed: Any) -> Family:
    sizes = {
        "model_type": "t2v",
        "in_dim": 16,
        "dim": 48,
        "ffn_dim": 96,
        "freq_dim": 32,
        "text_dim": WIDTH,
        "num_heads": 2,
        "num_layers": 2,
        **changed,
    }
    config = {k: v for k, v in sizes.items() if k != "model_type"}
    return Family("comfy.ldm.wan.model", "WanModel", sizes, (1, 16, 2, 8, 8), config)


def pooled(width: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pooled_output": torch.zeros(1, width)}


_HUNYUAN = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "vec_in_dim": 768,
    "context_in_dim": WIDTH,
    "hidden_size": 128,
    "mlp_ratio": 4.0,
    "num_heads": 1,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56],
    "theta": 256,
    "qkv_bias": True,
    "guidance_embed": True,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
_HUNYUAN15 = {
    **_HUNYUAN,
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "guidance_embed": False,
    "byt5": True,
    "use_cond_type_embedding": True,
    "vision_in_dim": 1152,
    "meanflow_sum": True,
}
_LTX = {
    "in_channels": 128,
    "cross_attention_dim": 64,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "caption_channels": WIDTH,
    "num_layers": 2,
}
_LTXAV = {
    **_LTX,
    "connector_attention_head_dim": 32,
    "connector_num_attention_heads": 2,
    "connector_num_layers": 1,
    "audio_in_channels": 128,
    "audio_cross_attention_dim": 64,
    "audio_attention_head_dim": 32,
    "audio_num_attention_heads": 2,
}
_KANDINSKY = {
    "in_text_dim": 3584,  # the host's detection does not read it
    "time_dim": 32,
    "model_dim": 64,
    "ff_dim": 128,
    "visual_embed_dim": 132,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
}
_MINIMAX = {
    "hidden_size": 64,
    "num_layers": 2,
    "token_refiner_num_layers": 1,
    "num_attention_heads": 1,
    "attention_head_dim": 96,
    "ffn_hidden_size": 128,
    "text_dim": 96,
    "timestep_input_dim": 32,
    "time_embed_hidden_size": 64,
    "time_embed_dim": 32,
}

FAMILIES: dict[str, Family] = {
    "wan": wan(),
    "wan_i2v": wan(model_type="i2v", in_dim=36),
    "wan_i2v_22": wan(in_dim=36),
    "hunyuan": Family(
        "comfy.ldm.hunyuan_video.model",
        "HunyuanVideo",
        _HUNYUAN,
        (1, 16, 2, 8, 8),
        extra=pooled(768),
    ),
    "hunyuan15": Family(
        "comfy.ldm.hunyuan_video.model",
        "HunyuanVideo",
        _HUNYUAN15,
        (1, 32, 2, 4, 4),
        extra=pooled(768),
    ),
    "ltx": Family(
        "comfy.ldm.lightricks.model",
        "LTXVModel",
        _LTX,
        (1, 128, 2, 4, 4),
        _LTX,
        extra=lambda: {"attention_mask": torch.ones(1, 6, dtype=torch.long)},
    ),
    "ltxav": Family(
        "comfy.ldm.lightricks.av_model",
        "LTXAVModel",
        _LTXAV,
        (1, 128, 2, 4, 4),
        _LTXAV,
        audio=(1, 8, 4, 16),
    ),
    "kandinsky5": Family(
        "comfy.ldm.kandinsky5.model",
        "Kandinsky5",
        _KANDINSKY,
        (1, 16, 2, 8, 8),
        text=3584,
        extra=pooled(768),
    ),
    "minimax_h3": Family(
        "comfy.ldm.minimax.model",
        "MiniMaxH3Model",
        _MINIMAX,
        (1, 24, 2, 4, 4),
        text=96,
        audio=(1, 32, 2, 8),
    ),
}


def network(family: str, seed: int = 0) -> torch.nn.Module:
    """The family's module in float32 with random weights. Raises ImportError on hosts without."""
    import importlib

    made = FAMILIES[family]
    kind = getattr(importlib.import_module(made.home), made.name)
    model = kind(
        **made.sizes, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        with torch.no_grad():
            if "norm" in name and name.endswith(("weight", "scale")):
                tensor.fill_(1.0)
            elif name.endswith("inv_freq"):
                tensor.copy_(10_000.0 ** -torch.linspace(0, 1, tensor.numel()))
            elif tensor.ndim > 1 or tensor.numel():
                tensor.normal_(std=0.05, generator=generator)
    return model


def write(family: str, path: Path, seed: int = 0, prefix: str = "") -> Path:
    """The family's checkpoint with random weights."""
    state = {
        prefix + k: v.clone().contiguous() for k, v in network(family, seed).state_dict().items()
    }
    config = FAMILIES[family].config
    metadata = None if config is None else {"config": json.dumps({"transformer": config})}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata=metadata)
    return path


def load(family: str, folder: Path, seed: int = 0) -> Any:
    """A model of the family as the host's loader for diffusion models gives it."""
    path = folder / f"{family}_{seed}.safetensors"
    return comfy.sd.load_diffusion_model(str(path if path.is_file() else write(family, path, seed)))


def latent(family: str) -> Any:
    """A small empty latent of the family; a pack of two where it makes sound as well."""
    made = FAMILIES[family]
    video = torch.zeros(made.latent)
    return NestedTensor([video, torch.zeros(made.audio)]) if made.audio else video


def text(family: str, words: str) -> list:
    """A conditioning that depends on the words: 6 tokens, near one another for near words."""
    made = FAMILIES[family]
    tokens = list(words.split()[:6]) + [""] * 6
    rows = [
        torch.randn(made.text, generator=torch.Generator().manual_seed(sum(word.encode())))
        for word in tokens[:6]
    ]
    return [[torch.stack(rows)[None], made.extra()]]
