"""Sparse attention connectivity: which blocks of tokens attend to which, observed on dense runs,
stored with their records, and tried on a target before it is reused."""

from .fuse import dense_layers, fuse, target_blocks
from .layout import Layout, block_for, layout
from .observe import RECALL, Observed, observe, row_mass, sample_rows
from .pack import Geometry, Layer, MaskError, Packed, pack
from .reuse import ANCHORS, LayerUse, Recorder, Reuse, anchor_steps
from .template import Measured, Shared, Static, Template, majority, nearest
from .verify import judge, recall

__all__ = [
    "ANCHORS",
    "RECALL",
    "Geometry",
    "Layer",
    "LayerUse",
    "Layout",
    "MaskError",
    "Measured",
    "Observed",
    "Packed",
    "Recorder",
    "Reuse",
    "Shared",
    "Static",
    "Template",
    "anchor_steps",
    "block_for",
    "dense_layers",
    "fuse",
    "judge",
    "layout",
    "majority",
    "nearest",
    "observe",
    "pack",
    "recall",
    "row_mass",
    "sample_rows",
    "target_blocks",
]
