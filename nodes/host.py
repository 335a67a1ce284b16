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
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.patcher_extension as extension
from torch import Tensor

from ..carnator.engine import Run
from ..carnator.matching import may_use_bank_noise
from ..carnator.report import Report
from ..carnator.request import Evaluation, Probe, Request, Settings
from ..carnator.signature import AttentionProbe, signature
from ..carnator.store import Store
from . import reports
from .guidance import KEY, PREDICT, observed_scale
from .matched import ProbeMismatch, Verdict, check_probe, moved
from .noise import bank_noise
from .observe import Watch, call_arguments
from .request import Unsupported, read_request

log = logging.getLogger("carnator")
OUTER = extension.WrappersMP.OUTER_SAMPLE


@dataclass(frozen=True)
class StoreChoice:
    """Where the records are and how big they may grow (bytes). Opening it twice is free."""

    folder: Path
    size_limit: int

    def open(self) -> Store:
        return Store.open(self.folder, self.size_limit)


def attach(model: Any, settings: Settings, store: StoreChoice) -> Any:
    """A clone of the model whose runs are accelerated; replaces an earlier Carnator on it."""
    clone = detach(model).clone()
    clone.add_wrapper_with_key(OUTER, KEY, Accelerator(settings, store))
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
    """A clone of a flow model with another shift of its noise schedule."""
    clone = model.clone()
    sampling = copy.deepcopy(clone.get_model_object("model_sampling"))
    sampling.set_parameters(shift=shift, multiplier=sampling.multiplier)
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
        options = executor.class_obj.model_options
        extension.add_wrapper_with_key(PREDICT, KEY, count, options, True)
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
            predict_noise = predictor(run, observed_scale(guider))
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
            extension.add_wrapper_with_key(PREDICT, KEY, predict_noise, guider.model_options, True)
            latent = run.finish(executor(*args, **kwargs))
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


def predictor(run: Run, cfg: float | None) -> Callable[..., Tensor]:
    """The ``PREDICT_NOISE`` wrapper of one run: each call is evaluated or predicted."""

    def predict_noise(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        x, sigma, options, rest = call_arguments(args, kwargs)

        def evaluate() -> Evaluation:
            watch = Watch(cfg, run.attention if run.wants_attention else None, x)
            denoised = executor(x, sigma, watch.options(options), *rest)
            return Evaluation(denoised, *watch.branches(denoised))

        return run.denoise(x, float(sigma.flatten()[0]), evaluate)

    return predict_noise


class ProbeDone(BaseException):
    """Stops the sampler after the probe's evaluation; never leaves this file."""


class Prober:
    """An ``OUTER_SAMPLE`` wrapper that makes the first evaluation of a run and stops there."""

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
        cfg = observed_scale(guider)

        def predict_noise(inner: Any, *args: Any, **kwargs: Any) -> Tensor:
            x, sigma, options, rest = call_arguments(args, kwargs)
            attention = AttentionProbe()
            watch = Watch(cfg, attention.see, x)
            denoised = inner(x, sigma, watch.options(options), *rest)
            branches = watch.branches(denoised)
            made = signature(denoised, *branches, attention)
            evaluation = Evaluation(denoised, *branches)
            probe = Probe(request, x, float(sigma.flatten()[0]), evaluation, made, watch.seconds)
            self.probe = moved(probe, "cpu")
            raise ProbeDone

        extension.add_wrapper_with_key(PREDICT, KEY, predict_noise, guider.model_options, True)
        try:
            return executor(*args, **kwargs)
        except ProbeDone:
            return given["latent_image"]
