"""Published models, by the host's own classes: what their token layout must be read to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

TEXT = 11  # tokens; unlike any count of video tokens here


@dataclass(frozen=True)
class Case:
    """A model class of the host. ``real`` builds the published model but for its depth, ``small``
    one with the same head and patch and random weights. ``latent`` is what ``small`` is given."""

    module: str
    cls: str
    real: dict[str, Any]
    small: dict[str, Any]
    latent: tuple[int, ...]
    layout: dict[str, Any]
    context: int = 64
    inputs: Callable[[], dict[str, Any]] = field(default=dict)
    heads: int | None = None


WAN = {"text_dim": 64, "num_layers": 2, "cross_attn_norm": True}
HUNYUAN = {
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 64,
    "mlp_ratio": 4.0,
    "depth": 2,
    "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56],
    "theta": 256,
    "qkv_bias": True,
    "guidance_embed": False,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
HUNYUAN_15 = HUNYUAN | {
    "patch_size": [1, 1, 1],
    "in_channels": 65,
    "out_channels": 32,
    "vec_in_dim": None,
    "depth_single_blocks": 0,
    "byt5": True,
    "use_cond_type_embedding": True,
    "vision_in_dim": 48,
    "meanflow_sum": True,
}
MOCHI = {
    "depth": 2,
    "patch_size": 2,
    "mlp_ratio_y": 4.0,
    "learn_sigma": False,
    "in_channels": 12,
    "qk_norm": True,
    "qkv_bias": False,
    "timestep_scale": 1000.0,
    "use_t5": True,
    "t5_feat_dim": 64,
}
COGVIDEOX = {"num_layers": 2, "text_embed_dim": 64, "use_rotary_positional_embeddings": True}
COSMOS = {
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "crossattn_emb_channels": 64,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True,
    "use_adaln_lora": True,
    "num_blocks": 2,
    "rope_enable_fps_modulation": False,
}
KANDINSKY = {"in_text_dim": 64, "time_dim": 64, "num_text_blocks": 2, "num_visual_blocks": 2}


def pooled() -> dict[str, Any]:
    return {"y": torch.randn(1, 768)}


CASES = {
    "wan 2.1 14B": Case(
        "wan.model",
        "WanModel",
        WAN | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40},
        WAN | {"dim": 256, "ffn_dim": 128, "num_heads": 2},
        (1, 16, 3, 6, 10),
        {"name": "Wan", "channels": 16, "heads": 40, "layers": 2, "calls": 2},
    ),
    "wan 2.1 image": Case(
        "wan.model",
        "WanModel",
        WAN | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "in_dim": 36, "model_type": "i2v"},
        WAN | {"dim": 256, "ffn_dim": 128, "num_heads": 2, "in_dim": 36, "model_type": "i2v"},
        (1, 36, 3, 6, 10),
        {"name": "Wan", "channels": 16, "heads": 40, "layers": 2, "calls": 3},
        inputs=lambda: {"clip_fea": torch.randn(1, 7, 1280)},
    ),
    "wan 2.2 5B": Case(
        "wan.model",
        "WanModel",
        WAN | {"dim": 3072, "ffn_dim": 14336, "num_heads": 24, "in_dim": 48, "out_dim": 48},
        WAN | {"dim": 256, "ffn_dim": 128, "num_heads": 2, "in_dim": 48, "out_dim": 48},
        (1, 48, 3, 6, 10),
        {"name": "Wan 2.2 5B", "channels": 48, "heads": 24, "layers": 2, "calls": 2},
    ),
    "hunyuanvideo": Case(
        "hunyuan_video.model",
        "HunyuanVideo",
        HUNYUAN | {"hidden_size": 3072, "num_heads": 24},
        HUNYUAN | {"hidden_size": 256, "num_heads": 2},
        (1, 16, 3, 6, 10),
        {"name": "HunyuanVideo", "heads": 24, "layers": 3, "text": "first", "before": 2},
        inputs=pooled,
    ),
    "hunyuanvideo 1.5": Case(
        "hunyuan_video.model",
        "HunyuanVideo",
        HUNYUAN_15 | {"hidden_size": 2048, "num_heads": 16},
        HUNYUAN_15 | {"hidden_size": 256, "num_heads": 2},
        (1, 65, 3, 4, 5),
        {
            "name": "HunyuanVideo 1.5",
            "channels": 32,
            "heads": 16,
            "layers": 2,
            "text": "first",
            "patch": (1, 1, 1),
        },
        inputs=lambda: {"txt_byt5": torch.randn(1, 5, 1472), "clip_fea": torch.randn(1, 9, 48)},
    ),
    "ltx-video": Case(
        "lightricks.model",
        "LTXVModel",
        {"num_layers": 2},
        {
            "num_layers": 2,
            "num_attention_heads": 3,
            "cross_attention_dim": 192,
            "caption_channels": 64,
        },
        (1, 128, 3, 4, 5),
        {"name": "LTX-Video", "channels": 128, "heads": 32, "head_dim": 64, "patch": (1, 1, 1)},
        inputs=lambda: {"attention_mask": None},
        heads=3,
    ),
    "mochi": Case(
        "genmo.joint_model.asymm_models_joint",
        "AsymmDiTJoint",
        MOCHI | {"hidden_size_x": 3072, "hidden_size_y": 1536, "num_heads": 24, "mlp_ratio_x": 4.0},
        MOCHI | {"hidden_size_x": 256, "hidden_size_y": 64, "num_heads": 2, "mlp_ratio_x": 48.0},
        (1, 12, 3, 6, 10),
        {"name": "Mochi", "channels": 12, "heads": 24, "layers": 2, "text": "last"},
        inputs=lambda: {"attention_mask": torch.ones(1, TEXT).bool(), "num_tokens": TEXT - 2},
    ),
    "cogvideox 5B": Case(
        "cogvideo.model",
        "CogVideoXTransformer3DModel",
        COGVIDEOX | {"num_attention_heads": 48},
        COGVIDEOX | {"num_attention_heads": 2},
        (1, 16, 3, 6, 10),
        {"name": "CogVideoX", "channels": 16, "heads": 48, "head_dim": 64, "text": "first"},
    ),
    "cogvideox 1.5": Case(
        "cogvideo.model",
        "CogVideoXTransformer3DModel",
        COGVIDEOX | {"num_attention_heads": 48, "patch_size_t": 2},
        COGVIDEOX | {"num_attention_heads": 2, "patch_size_t": 2},
        (1, 16, 4, 6, 10),
        {"name": "CogVideoX 1.5", "channels": 16, "heads": 48, "head_dim": 64, "patch": (2, 2, 2)},
    ),
    "cosmos predict2 14B": Case(
        "cosmos.predict2",
        "MiniTrainDIT",
        COSMOS | {"model_channels": 5120, "num_heads": 40},
        COSMOS | {"model_channels": 256, "num_heads": 2},
        (1, 16, 3, 6, 10),
        {"name": "Cosmos Predict2", "channels": 16, "heads": 40, "layers": 2, "calls": 2},
    ),
    "kandinsky 5 lite": Case(
        "kandinsky5.model",
        "Kandinsky5",
        KANDINSKY | {"model_dim": 1792, "ff_dim": 7168},
        KANDINSKY | {"model_dim": 128, "ff_dim": 128, "visual_embed_dim": 132},
        (1, 33, 3, 6, 10),
        {"name": "Kandinsky 5", "channels": 16, "heads": 28, "head_dim": 64, "before": 2},
        inputs=pooled,
    ),
}
