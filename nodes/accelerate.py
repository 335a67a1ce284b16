"""Carnator Accelerate: the one-node way in."""

from __future__ import annotations

from comfy_api.latest import io

from ..carnator.noise import POLICIES
from ..carnator.request import Settings
from ..carnator.risk import PRESETS
from . import host
from .live import Line
from .store import CarnatorStoreType, default_store

CATEGORY = "Carnator"
SPARSE = ("off", "auto", "0.5", "0.35", "0.2")


def preset_input(**kwargs: object) -> io.Combo.Input:
    return io.Combo.Input(
        "preset",
        options=[*PRESETS, "custom"],
        default="balanced",
        tooltip="How near the result has to stay to the one you would get without reuse. faithful: "
        "hard to tell apart. balanced: the same clip. fast: for trying things out; most runs stay "
        "close. custom: the number in budget_db.",
        **kwargs,
    )


def budget_input() -> io.Float.Input:
    return io.Float.Input(
        "budget_db",
        default=PRESETS["balanced"],
        min=10.0,
        max=80.0,
        step=0.5,
        advanced=True,
        tooltip="For the preset custom: how near to the run without reuse nearly all runs have to "
        "stay, as latent PSNR in dB. More is stricter.",
    )


def record_input() -> io.Boolean.Input:
    return io.Boolean.Input(
        "record",
        default=True,
        advanced=True,
        tooltip="Keep runs that found nothing to reuse, so that later ones can build on them.",
    )


def exact_input() -> io.Boolean.Input:
    return io.Boolean.Input(
        "exact_hits",
        default=True,
        advanced=True,
        tooltip="Serve a request that was made before from its record, after one evaluation to "
        "make sure that the model still gives the same.",
    )


def sparse_input() -> io.Combo.Input:
    return io.Combo.Input(
        "sparse_attention",
        options=list(SPARSE),
        default="off",
        advanced=True,
        tooltip="Attention over the blocks of tokens that an earlier run needed, on steps that are "
        "evaluated, where each head proves to keep 95 % of its attention. auto: wherever that is "
        "expected to be faster, in videos of some thousand tokens. A number: only heads that look "
        "at no larger share of the blocks. Runs that are recorded stay as they are, and are "
        "observed for later ones.",
    )


class CarnatorAccelerate(io.ComfyNode):
    """MODEL in, MODEL out; everything else in the graph stays as it is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorAccelerate",
            display_name="Carnator Accelerate",
            category=CATEGORY,
            description="Makes the next generation cheaper by what earlier ones computed. Connect "
            "it between the model and the sampler; the first run of its kind is recorded, small "
            "changes to it (words, CFG, steps, LoRA) then need fewer model evaluations.",
            search_aliases=["cache", "speed up", "reuse", "faster", "easycache", "teacache"],
            inputs=[
                io.Model.Input("model", tooltip="The model to accelerate, with its LoRAs applied."),
                preset_input(),
                io.Combo.Input(
                    "noise_policy",
                    options=list(POLICIES),
                    default="keep",
                    tooltip="keep: the noise of your seed, so reuse needs a fixed seed. bank: the "
                    "seed picks one of 16 shared noises, so that runs with different seeds can "
                    "build on each other.",
                ),
                io.Boolean.Input(
                    "enabled",
                    default=True,
                    tooltip="Off: the model passes through untouched.",
                ),
                budget_input(),
                record_input(),
                exact_input(),
                sparse_input(),
                CarnatorStoreType.Input(
                    "store",
                    optional=True,
                    tooltip="From Carnator Store; unconnected, the one of the settings.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The accelerated model.")],
            hidden=[io.Hidden.unique_id],  # its page is told of its runs
        )

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        preset: str,
        noise_policy: str,
        enabled: bool,
        budget_db: float = PRESETS["balanced"],
        record: bool = True,
        exact_hits: bool = True,
        sparse_attention: str = "off",
        store: host.StoreChoice | None = None,
    ) -> io.NodeOutput:
        settings = Settings(
            preset,
            budget_db,
            noise_policy,
            record=record,
            exact_hits=exact_hits,
            sparse=sparse_attention,
        )
        if not enabled:
            return io.NodeOutput(host.detach(model))
        line = Line(cls.hidden.unique_id if cls.hidden else "")
        return io.NodeOutput(host.attach(model, settings, store or default_store(), line))
