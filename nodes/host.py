"""The one file that patches the host: a model clone whose runs ask Carnator's engine.

The life of a run: the host calls ``OUTER_SAMPLE``; the wrapper reads the request, makes a ``Run``
and adds a ``PREDICT_NOISE`` wrapper to the guider's options, which the host made for this run
alone and drops after it. The sampler itself is never touched, so progress, previews and Cancel
work as without Carnator. Settings live on the model; the state of a run is a local of the wrapper.

Latents handed to ``Run.finish`` and kept in records are in the space ``OUTER_SAMPLE`` returns:
after the latent format's ``process_out``, as the sampler node hands them on.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.patcher_extension as extension
from torch import Tensor

from ..carnator.engine import Run
from ..carnator.matching import may_use_bank_noise
from ..carnator.report import Report
from ..carnator.request import Evaluation, Request, Settings
from . import reports
from .guidance import KEY, PREDICT, attention_visible, observed_scale
from .live import Line, followed
from .matched import ProbeMismatch, Verdict, check_probe, moved
from .noise import bank_noise
from .observe import Watch, call_arguments
from .places import StoreChoice
from .refusals import READS_GUIDANCE, Unsupported, reads_guidance
from .request import read_request, unsure
from .stages import boundary, left
from .weights import token_layout

log = logging.getLogger("carnator")
OUTER = extension.WrappersMP.OUTER_SAMPLE


def attach(model: Any, settings: Settings, store: StoreChoice, line: Line | None = None) -> Any:
    """A clone of the model whose runs are accelerated; replaces an earlier Carnator on it. What
    they do is told to ``line``."""
    clone = detach(model).clone()
    clone.add_wrapper_with_key(OUTER, KEY, Accelerator(settings, store, told=line))
    return clone


def detach(model: Any) -> Any:
    """The model without Carnator: itself when there is none on it."""
    if not model.get_wrappers(OUTER, KEY):
        return model
    clone = model.clone()
    clone.remove_wrappers_with_key(OUTER, KEY)
    return clone


def guider_with(guider: Any, wrapper: Callable[..., Any]) -> Any:
    """A copy of a guider whose next run goes through ``wrapper``; the guider stays as it is."""
    twin = copy.copy(guider)
    twin.model_patcher = guider.model_patcher.clone()
    twin.model_patcher.remove_wrappers_with_key(OUTER, KEY)
    twin.model_patcher.add_wrapper_with_key(OUTER, KEY, wrapper)
    if guider.model_options is guider.model_patcher.model_options:
        twin.model_options = twin.model_patcher.model_options
    return twin


def accelerated(guider: Any) -> bool:
    """True when Carnator Accelerate is on the guider's model."""
    return bool(guider.model_patcher.get_wrappers(OUTER, KEY))


def with_shift(model: Any, shift: float) -> Any:
    """A clone of a flow model with another shift of its noise schedule.

    Where the host counts the shift as an exponent (LTX-Video), it is given its logarithm and a
    table as fine as the others', so that equal shifts give all families one schedule.
    """
    clone = model.clone()
    sampling = copy.deepcopy(clone.get_model_object("model_sampling"))
    if hasattr(sampling, "multiplier"):
        sampling.set_parameters(shift=shift, multiplier=sampling.multiplier)
    else:
        sampling.set_parameters(shift=math.log(shift), timesteps=1000)
    clone.add_object_patch("model_sampling", sampling)
    return clone


def model_space(model: Any, samples: Tensor) -> Tensor:
    """A latent as the sampler node gave it, in the space the model works in."""
    return model.get_model_object("latent_format").process_in(samples)


class Bystander:
    """An ``OUTER_SAMPLE`` wrapper for runs that are left alone: it counts evaluations and tells
    why nothing is reused."""

    def __init__(
        self,
        reason: str,
        told: Callable[[Report], None] | None = None,
        settings: Settings | None = None,
    ):
        self.reason, self.told, self.settings = reason, told, settings or Settings()

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        report = Report("dense", self.reason, self.settings.preset, self.settings.budget)
        report.record = f"not recorded: {self.reason}"
        log.info("[Carnator] dense: %s", self.reason)

        def count(inner: Any, *args: Any, **kwargs: Any) -> Tensor:
            report.evaluations += 1
            report.dense_evaluations += 1
            return inner(*args, **kwargs)

        began = time.perf_counter()
        watch_predictions(executor.class_obj, count)
        latent = executor(*args, **kwargs)
        report.seconds = time.perf_counter() - began
        tell(report, latent, self.told)
        return latent


def tell(report: Report, latent: Tensor | None, told: Callable[[Report], None] | None) -> None:
    """Hand on the report of a run; a fault in that is no reason to lose the run's result."""
    try:
        reports.remember(report, latent)
        if told is not None:
            told(report)
    except Exception as error:
        log.warning("[Carnator] no report of this run (%s: %s)", type(error).__name__, error)


class Accelerator:
    """The ``OUTER_SAMPLE`` wrapper. Holds settings only; its runs leave nothing behind in it.

    ``verdict`` is a match made before by the pipeline nodes, whose probe then serves as the first
    evaluation. ``told`` is called with the report of each run.
    """

    def __init__(
        self,
        settings: Settings,
        store: StoreChoice,
        verdict: Verdict | None = None,
        told: Callable[[Report], None] | None = None,
    ):
        self.settings, self.store = settings, store
        self.verdict, self.told = verdict, told

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        guider = executor.class_obj
        try:
            run, noise = self._start(guider, named(executor, args, kwargs))
            steps = StepWrapper(run, guider)
        except ProbeMismatch:
            raise
        except Unsupported as reason:
            return self._beside(f"this run is left alone: {reason}")(executor, *args, **kwargs)
        except Exception as error:
            log.debug("[Carnator] could not start", exc_info=True)
            beside = self._beside(f"Carnator could not start ({type(error).__name__}: {error})")
            return beside(executor, *args, **kwargs)
        if args:  # passed on as they came: wrappers of other packs may count on it
            args = (noise, *args[1:])
        else:
            kwargs["noise"] = noise
        latent = None
        try:
            watch_predictions(guider, followed(steps, self.told))
            latent = steps.finish(executor(*args, **kwargs))
            return latent
        finally:  # Cancel is no Exception
            if latent is None:
                run.abandon("the run failed or was cancelled")
            tell(run.report, latent, self.told)

    def _start(self, guider: Any, given: dict[str, Any]) -> tuple[Run, Tensor]:
        """The run and the noise it starts from; raises Unsupported."""
        request, store = read_call(guider, given), self.store.open()
        noise = given["noise"]
        if self.verdict is not None:
            probe = self.verdict.match.probe
            check_probe(probe, request)
            if unsure(probe.request, request):  # the run makes an evaluation of its own
                return Run(self.settings, request, store), noise
            probe = moved(probe, guider.model_patcher.load_device)
            match = self.verdict.match
            return Run(self.settings, request, store, probe=probe, verdict=match), noise
        if self.settings.noise_policy == "bank":
            shared = bank_noise(request, noise, guider.model_patcher)
            banked = None if shared is None else read_call(guider, {**given, "noise": shared})
            if banked is not None and shared is not None and may_use_bank_noise(banked, store):
                request, noise = banked, shared
        return Run(self.settings, request, store), noise

    def _beside(self, reason: str) -> Bystander:
        if isinstance(self.told, Line):
            self.told.aside(reason)
        return Bystander(reason, self.told, self.settings)


def named(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an ``OUTER_SAMPLE`` call by name, however they were passed."""
    return dict(inspect.signature(executor.original).bind(*args, **kwargs).arguments)


def read_call(guider: Any, given: dict[str, Any]) -> Request:
    """The request behind the arguments of ``OUTER_SAMPLE``."""
    return read_request(
        guider,
        given["noise"],
        given["latent_image"],
        given["sampler"],
        given["sigmas"],
        given.get("denoise_mask"),
        given.get("seed"),
        given.get("latent_shapes"),
    )


def watch_predictions(guider: Any, wrapper: Callable[..., Tensor]) -> None:
    """Put a ``PREDICT_NOISE`` wrapper on a guider's options, which the host made for one run."""
    extension.add_wrapper_with_key(PREDICT, KEY, wrapper, guider.model_options, True)


class StepWrapper:
    """The ``PREDICT_NOISE`` wrapper of one run: each call is evaluated or predicted."""

    def __init__(self, run: Run, guider: Any):
        self.run = run
        self.cfg = observed_scale(guider)
        self.attends = attention_visible(guider)
        self.backbone = partial(token_layout, guider.model_patcher)
        self.aside = ""  # why the run is left alone, if it is only seen while it runs
        self._beside = 0  # evaluations since

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        x, sigma, options, rest = call_arguments(args, kwargs)
        if not self.aside and reads_guidance(executor.class_obj, options):
            self.aside = READS_GUIDANCE
        if self.aside:
            self._beside += 1
            return executor(*args, **kwargs)
        run = self.run

        def evaluate() -> Evaluation:
            shown = run.attention if self.attends and run.wants_attention else None
            sparse = partial(run.connectivity.override, self.backbone, x.shape)
            watch = Watch(self.cfg, shown, x, sparse if self.attends else None)
            denoised = executor(x, sigma, watch.options(options), *rest)
            return Evaluation(denoised, *watch.branches(denoised))

        return run.denoise(x, float(sigma.flatten()[0]), evaluate)

    def finish(self, latent: Tensor) -> Tensor:
        """Close the run; returns the latent to hand out."""
        run = self.run
        if self.aside:
            run.abandon(self.aside)
            report = run.report
            report.decision, report.reason = "dense", f"this run is left alone: {self.aside}"
            report.evaluations += self._beside
            report.dense_evaluations += self._beside
            log.info("[Carnator] %s", report.line())
            return latent
        self._joining(lambda: labelled(run, latent))
        handed = run.finish(latent)
        self._joining(lambda: left(run.request, handed))
        return handed

    def _joining(self, work: Callable[[], object]) -> None:
        """What joins this run to the next stage; a fault in it is no reason to lose the run."""
        try:
            work()
        except Exception as error:
            log.warning("[Carnator] stages are not joined (%s: %s)", type(error).__name__, error)


def labelled(run: Run, latent: Tensor) -> None:
    """Write into the record to come at which boundary its stage ends."""
    if run.request.sigmas[-1] > 0:
        ends = {**run.request.labels, "ends": boundary(latent)}
        run.request = replace(run.request, labels=ends)
