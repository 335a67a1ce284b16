"""The same pipeline opened up: probe, match, scope, sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from comfy_api.latest import io, ui
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from torch import Tensor

from ..carnator.derivative import derivative
from ..carnator.matching import Match, confirm
from ..carnator.matching import match as find_match
from ..carnator.report import Report
from ..carnator.request import Probe, Settings
from ..carnator.risk import PRESETS
from . import host, reports
from .accelerate import (
    CATEGORY,
    budget_input,
    exact_input,
    preset_input,
    record_input,
    sparse_input,
)
from .live import Line
from .matched import Verdict
from .pictures import heat_map, plain_map
from .probing import Prober
from .report import CarnatorReportType
from .store import CarnatorStoreType, default_store

CarnatorProbeType = io.Custom("CARNATOR_PROBE")
CarnatorMatchType = io.Custom("CARNATOR_MATCH")
CarnatorScopeType = io.Custom("CARNATOR_SCOPE")
FAINT = 0.05  # of the donor's mean square derivative: differences below it are never shown as dark
UNSEEN = "no probe could be made: {}"


@dataclass(frozen=True)
class Probed:
    """A probe, or why there is none."""

    probe: Probe | None
    refusal: str = ""


def sampling_inputs() -> list[io.Input]:
    """The inputs of the host's SamplerCustomAdvanced."""
    return [
        io.Noise.Input("noise", tooltip="From Random Noise."),
        io.Guider.Input("guider", tooltip="From a CFG Guider or another guider."),
        io.Sampler.Input("sampler", tooltip="From KSampler Select or another sampler node."),
        io.Sigmas.Input("sigmas", tooltip="The noise levels, from a scheduler node."),
        io.Latent.Input("latent_image", tooltip="The latent to start from."),
    ]


class CarnatorProbe(io.ComfyNode):
    """Makes the first model evaluation of a run, which the sampler then does not make again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorProbe",
            display_name="Carnator Probe",
            category=CATEGORY,
            description="Makes the first model evaluation of a generation and describes it. The "
            "evaluation is not lost: Carnator Sparse-Attention Sampler goes on from it.",
            search_aliases=["early signature", "first step"],
            inputs=sampling_inputs(),
            outputs=[
                CarnatorProbeType.Output(
                    display_name="probe", tooltip="For Carnator Signature Match."
                )
            ],
        )

    @classmethod
    def execute(
        cls,
        noise: io.Noise.Type,
        guider: io.Guider.Type,
        sampler: io.Sampler.Type,
        sigmas: Tensor,
        latent_image: io.Latent.Type,
    ) -> io.NodeOutput:
        prober = Prober()
        twin = host.guider_with(guider, prober)
        SamplerCustomAdvanced.execute(noise, twin, sampler, sigmas, latent_image)
        if prober.probe is None and not prober.refusal:
            prober.refusal = "the schedule is empty"
        return io.NodeOutput(Probed(prober.probe, prober.refusal or ""))


class CarnatorSignatureMatch(io.ComfyNode):
    """Looks for the earlier generation whose computation is valid here."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorSignatureMatch",
            display_name="Carnator Signature Match",
            category=CATEGORY,
            description="Compares a probe with earlier generations and decides whether, and with "
            "how few model evaluations, the best of them can carry this one.",
            search_aliases=["donor", "similar generation"],
            inputs=[
                CarnatorProbeType.Input("probe", tooltip="From Carnator Probe."),
                preset_input(),
                budget_input(),
                record_input(),
                exact_input(),
                CarnatorStoreType.Input(
                    "store",
                    optional=True,
                    tooltip="From Carnator Store; unconnected, the one of the settings.",
                ),
            ],
            outputs=[
                CarnatorMatchType.Output(display_name="match", tooltip="For Carnator Reuse Scope."),
                io.Boolean.Output(
                    display_name="accepted", tooltip="True when an earlier generation is reused."
                ),
                CarnatorReportType.Output(
                    display_name="report", tooltip="The decision and why, for Carnator Report."
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        probe: Probed,
        preset: str,
        budget_db: float = PRESETS["balanced"],
        record: bool = True,
        exact_hits: bool = True,
        store: host.StoreChoice | None = None,
    ) -> io.NodeOutput:
        settings = Settings(preset, budget_db, record=record, exact_hits=exact_hits)
        choice = store or default_store()
        report = Report("dense", preset=preset, budget_db=settings.budget)
        if probe.probe is None:
            report.reason = UNSEEN.format(probe.refusal)
            return io.NodeOutput(None, False, report)
        found, second = find_match(probe.probe, settings, choice.open()), probe.probe.second
        if found.decision == "candidate" and second is not None:
            d = derivative(second.x, second.evaluation.denoised, second.sigma)
            found = confirm(found, d, second.sigma, settings, choice.open())
        report.judged(found)
        report.evaluations = report.dense_evaluations = 1 if second is None else 2
        report.seconds = probe.probe.seconds + (0.0 if second is None else second.seconds)
        if found.donor is not None and found.accepted:
            report.donor = found.donor.id
            report.donor_label = str(found.donor.meta.get("label", ""))
        return io.NodeOutput(Verdict(found, settings, choice), found.accepted, report)


class CarnatorReuseScope(io.ComfyNode):
    """Shows where a generation departs from its donor, and hands the match to the sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorReuseScope",
            display_name="Carnator Reuse Scope",
            category=CATEGORY,
            description="Shows where the new generation starts out like the earlier one (bright) "
            "and where it departs from it (dark), frame by frame. The sampler starts from this "
            "match and refines the map as it goes.",
            search_aliases=["mask", "difference map"],
            inputs=[CarnatorMatchType.Input("match", tooltip="From Carnator Signature Match.")],
            outputs=[
                CarnatorScopeType.Output(
                    display_name="scope", tooltip="For Carnator Sparse-Attention Sampler."
                ),
                io.Image.Output(
                    display_name="preview", tooltip="One image per latent frame; dark departs."
                ),
            ],
        )

    @classmethod
    def execute(cls, match: Verdict | None) -> io.NodeOutput:
        field = None if match is None else agreement(match.match)
        image = plain_map(0) if field is None else heat_map(field)
        return io.NodeOutput(match, image, ui=ui.PreviewImage(image, cls=cls))


def agreement(found: Match) -> Tensor | None:
    """1 where the first derivatives of request and donor agree, 0 where they differ most,
    [F, h, w]; None without a donor. Differences that are faint against the donor's own derivative
    stay faint: rounding in a repeated request must not look like a departure."""
    field = found.d0_map
    if field is None:
        return None
    most = field.max()
    if found.d0:
        most = torch.maximum(most, FAINT * field.mean() / found.d0)
    return 1 - field / most.clamp_min(1e-12)


class CarnatorSparseAttentionSampler(io.ComfyNode):
    """The host's SamplerCustomAdvanced, with a scope."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorSparseAttentionSampler",
            display_name="Carnator Sparse-Attention Sampler",
            category=CATEGORY,
            description="A drop-in for SamplerCustomAdvanced. With a scope it goes on from the "
            "probe's evaluation and reuses the matched generation, its attention's connectivity "
            "too where that is switched on; without one it samples as usual.",
            search_aliases=["SamplerCustomAdvanced", "carnator sampler"],
            inputs=[
                *sampling_inputs(),
                CarnatorScopeType.Input(
                    "scope",
                    optional=True,
                    tooltip="From Carnator Reuse Scope, made with the same five inputs.",
                ),
                sparse_input(),
            ],
            outputs=[
                io.Latent.Output(display_name="output", tooltip="The sampled latent."),
                io.Latent.Output(
                    display_name="denoised_output",
                    tooltip="The clean latent expected at the last step.",
                ),
                CarnatorReportType.Output(
                    display_name="report", tooltip="What was reused and why, for Carnator Report."
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        noise: io.Noise.Type,
        guider: io.Guider.Type,
        sampler: io.Sampler.Type,
        sigmas: Tensor,
        latent_image: io.Latent.Type,
        scope: Verdict | None = None,
        sparse_attention: str = "off",
    ) -> io.NodeOutput:
        told: list[Report] = []
        if scope is not None:
            line = Line(then=told.append)
            settings = replace(scope.settings, sparse=sparse_attention)
            wrapper = host.Accelerator(settings, scope.store, scope, line)
            guider = host.guider_with(guider, wrapper)
        elif not host.accelerated(guider):
            beside = host.Bystander("no match was made for this run", Line(then=told.append))
            guider = host.guider_with(guider, beside)
        result = SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, latent_image)
        report = told[-1] if told else reports.find(result[0]["samples"])
        report = report or Report("dense", "nothing was sampled")
        return io.NodeOutput(result[0], result[1], report)
