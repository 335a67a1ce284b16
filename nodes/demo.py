"""Nodes around the bundled tiny models: everything the demo workflows need, nothing to download."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import comfy.sd
import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ..carnator.demo import captions, clips, families
from . import host
from .pictures import enlarge

CATEGORY = "Carnator/demo"
EXAMPLE = "red circle left and blue square still on gray"
FPS = 4.0  # of the moving preview: a clip of 4 frames lasts a second


def bundled() -> list[str]:
    """Names of the models in the pack."""
    paths = [family.path for family in families.FAMILIES.values()]
    return [path.stem for path in paths if path.is_file()] or [families.WAN.path.stem]


def family_of(model: Any) -> families.Family:
    """The family a loaded model belongs to. Raises ValueError when it is not one of the demo's."""
    try:
        return families.of_checkpoint(model.model.diffusion_model.state_dict())
    except ValueError as error:
        raise ValueError(
            f"The model is not one of the demo's ({error}): use Carnator Load Demo Model."
        ) from error


class CarnatorLoadDemoModel(io.ComfyNode):
    """Loads a bundled model through the host's own loader for diffusion models."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorLoadDemoModel",
            display_name="Carnator Load Demo Model",
            category=CATEGORY,
            description="Loads a tiny video model that comes with Carnator: 4 frames of coloured "
            "shapes, made in seconds on a CPU. For trying things out without a download.",
            search_aliases=["tiny wan", "tiny hunyuan video", "tiny ltx", "test model"],
            inputs=[
                io.Combo.Input(
                    "model_name", options=bundled(), tooltip="The bundled model to load."
                ),
                io.Float.Input(
                    "shift",
                    default=5.0,
                    min=0.1,
                    max=100.0,
                    step=0.1,
                    advanced=True,
                    tooltip="Shift of the noise schedule; 5 is what the models are tuned for.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, for a sampler or Carnator Accelerate.")],
        )

    @classmethod
    def execute(cls, model_name: str, shift: float = 5.0) -> io.NodeOutput:
        path = families.MODELS / f"{model_name}.safetensors"
        if model_name not in bundled() or not path.is_file():
            raise ValueError(
                f"There is no bundled model {model_name!r} in {families.MODELS}: reinstall the "
                f"pack, or choose one of {', '.join(bundled())}."
            )
        model = comfy.sd.load_diffusion_model(str(path))
        return io.NodeOutput(host.with_shift(model, shift))


class CarnatorDemoCaption(io.ComfyNode):
    """Text to the embedding the bundled models were trained on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorDemoCaption",
            display_name="Carnator Demo Caption",
            category=CATEGORY,
            description="Encodes a caption for the demo models: one or two things (colour, shape, "
            f"motion) and a background, such as {EXAMPLE!r}. Empty is the negative prompt.",
            search_aliases=["prompt", "text encode"],
            inputs=[
                io.String.Input(
                    "text",
                    default=EXAMPLE,
                    multiline=True,
                    tooltip=f"Colours: {', '.join(captions.COLORS)}. Shapes: "
                    f"{', '.join(captions.SHAPES)}. Motions: {', '.join(captions.MOTIONS)}. "
                    f"Backgrounds: {', '.join(captions.BACKGROUNDS)}.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The demo model the caption is for. Tiny LTX-Video needs it, since it "
                    "wants a mask that HunyuanVideo cannot take.",
                ),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the positive or negative of a sampler.")],
        )

    @classmethod
    def validate_inputs(cls, text: str | None = None) -> bool | str:
        """Tells a caption that cannot be read before anything is queued."""
        if text and text.strip():
            try:
                captions.parse(text)
            except ValueError as error:
                return str(error)
        return True

    @classmethod
    def execute(cls, text: str, model: io.Model.Type | None = None) -> io.NodeOutput:
        caption = captions.parse(text) if text.strip() else None
        tokens = captions.embed(caption)[None]
        # Without a model: Wan takes no notice of what HunyuanVideo asks for.
        family = families.HUNYUAN if model is None else family_of(model)
        return io.NodeOutput([[tokens, family.conditioning(tokens)]])


class CarnatorDemoEmptyLatent(io.ComfyNode):
    """An empty latent of the size the bundled models were trained on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorDemoEmptyLatent",
            display_name="Carnator Demo Empty Latent",
            category=CATEGORY,
            description="An empty latent for a demo model: 4 frames of 32 x 32 pixels.",
            search_aliases=["empty video"],
            inputs=[
                io.Int.Input(
                    "frames",
                    default=clips.FRAMES,
                    min=1,
                    max=16,
                    advanced=True,
                    tooltip="Frames of the clip; the models were trained on 4. LTX-Video takes "
                    "even numbers.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The demo model the latent is for; without it, tiny Wan.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="For a sampler.")],
        )

    @classmethod
    def execute(
        cls, frames: int = clips.FRAMES, model: io.Model.Type | None = None
    ) -> io.NodeOutput:
        family = families.WAN if model is None else family_of(model)
        return io.NodeOutput({"samples": torch.zeros(family.latent_shape(frames))})


class CarnatorDemoDecode(io.ComfyNode):
    """Unfolds a latent of a demo model into frames; no VAE takes part."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorDemoDecode",
            display_name="Carnator Demo Decode",
            category=CATEGORY,
            description="Turns a latent of a demo model into frames and shows them moving. The "
            "latent is a fold of the pixels, so there is no VAE.",
            search_aliases=["vae decode"],
            is_output_node=True,
            inputs=[
                io.Latent.Input("latent", tooltip="The sampled latent."),
                io.Model.Input("model", tooltip="The demo model that made it."),
                io.Int.Input(
                    "enlarge",
                    default=8,
                    min=1,
                    max=32,
                    tooltip="Every pixel is shown this many times in both directions.",
                ),
            ],
            outputs=[io.Image.Output(tooltip="The frames, as a batch of images.")],
        )

    @classmethod
    def execute(
        cls, latent: io.Latent.Type, model: io.Model.Type, enlarge: int = 8
    ) -> io.NodeOutput:
        samples, family = latent["samples"], family_of(model)
        if samples.ndim != 5 or samples.shape[1] != family.channels:
            raise ValueError(
                f"A latent of shape {list(samples.shape)} is not one of the {family.title} demo "
                f"model: use [1, {family.channels}, frames, rows, columns], from Carnator Demo "
                "Empty Latent with the same model."
            )
        clip = family.to_clip(host.model_space(model, samples.cpu()))
        frames = clip.permute(0, 2, 3, 4, 1).flatten(0, 1).add(1).div(2)
        shown = magnified(frames, enlarge)
        return io.NodeOutput(shown, ui=moving(shown))


magnified = enlarge


def moving(frames: Tensor) -> ui.SavedImages:
    """The frames [F, H, W, 3] as one looping file in the host's folder for temporary ones."""
    saved = ui.ImageSaveHelper.save_animated_webp(
        frames,
        filename_prefix=f"carnator_{uuid4().hex[:8]}",
        folder_type=io.FolderType.temp,
        cls=None,
        fps=FPS,
        lossless=True,
        quality=80,
        method=4,
    )
    return ui.SavedImages([saved], is_animated=len(frames) > 1)
