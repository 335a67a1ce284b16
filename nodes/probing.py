"""The first evaluation of a run, made before the sampler node runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..carnator.request import Evaluation, Later, Probe
from ..carnator.signature import AttentionProbe, signature
from .guidance import attention_visible, observed_scale
from .host import named, read_call, watch_predictions
from .matched import moved
from .observe import Watch, call_arguments
from .refusals import READS_GUIDANCE, Unsupported, reads_guidance


class ProbeDone(BaseException):
    """Stops the sampler after the probe's evaluation; never leaves this file."""


class Prober:
    """An ``OUTER_SAMPLE`` wrapper that makes the first two evaluations of a run and stops."""

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self.refusal: str | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        guider = executor.class_obj
        given = named(executor, args, kwargs)
        try:
            request = read_call(guider, given)
        except Unsupported as reason:
            self.refusal = str(reason)
            return given["latent_image"]
        except Exception as error:
            self.refusal = f"the run could not be read ({type(error).__name__}: {error})"
            return given["latent_image"]
        cfg, attends = observed_scale(guider), attention_visible(guider)

        def predict_noise(inner: Any, *args: Any, **kwargs: Any) -> Tensor:
            x, sigma, options, rest = call_arguments(args, kwargs)
            if reads_guidance(inner.class_obj, options):
                self.refusal = READS_GUIDANCE
                raise ProbeDone
            first = self.probe
            attention = AttentionProbe() if first is None else None
            watch = Watch(cfg, attention.see if attends and attention is not None else None, x)
            denoised = inner(x, sigma, watch.options(options), *rest)
            branches = watch.branches(denoised)
            evaluation, level = Evaluation(denoised, *branches), float(sigma.flatten()[0])
            if first is not None:
                second = Later(x, level, evaluation, watch.seconds)
                self.probe = moved(replace(first, second=second), "cpu")
                raise ProbeDone
            made = signature(denoised, *branches, attention)
            probe = Probe(request, x, level, evaluation, made, watch.seconds)
            self.probe = moved(probe, "cpu")
            return denoised

        watch_predictions(guider, predict_noise)
        try:
            return executor(*args, **kwargs)
        except ProbeDone:
            return given["latent_image"]
