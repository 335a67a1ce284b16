"""Carnator Report: what happened in a run and why, as text, map and data."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..carnator.report import Report
from . import reports
from .pictures import heat_map, plain_map

CarnatorReportType = io.Custom("CARNATOR_REPORT")
NOTHING = "No run to report yet: connect the latent of a sampler whose model went through Carnator."


class CarnatorReport(io.ComfyNode):
    """Runs after the sampler, because it takes what the sampler gives."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorReport",
            display_name="Carnator Report",
            category="Carnator",
            description="Says what was reused in a run and why, and shows where: bright cells "
            "followed the earlier generation, dark ones were computed anew. Connect the latent of "
            "a sampler, or the report of a Carnator node.",
            search_aliases=["statistics", "log", "speedup", "scope map"],
            is_output_node=True,
            inputs=[
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="The latent of the run to report on; it is passed on.",
                ),
                CarnatorReportType.Input(
                    "report",
                    optional=True,
                    tooltip="The report of a Carnator node; used instead of the latent's run.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The latent, unchanged."),
                io.String.Output(display_name="text", tooltip="The report for reading."),
                io.Image.Output(display_name="map", tooltip="The reuse scope, one image a frame."),
            ],
        )

    @classmethod
    def execute(
        cls, latent: io.Latent.Type | None = None, report: Report | None = None
    ) -> io.NodeOutput:
        if report is None:
            samples = None if latent is None else latent["samples"]
            report = reports.find(samples)
        text = NOTHING if report is None else report.text()
        if report is None or report.scope is None:
            image = plain_map(report is not None and report.decision == "exact")
        else:
            image = heat_map(report.scope)
        shown: dict[str, Any] = {"text": (text,)}
        if report is not None:
            shown["carnator"] = (report.as_dict(),)
        shown |= ui.PreviewImage(image, cls=cls).as_dict()
        return io.NodeOutput(latent, text, image, ui=shown)
