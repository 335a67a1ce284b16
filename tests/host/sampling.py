"""Short cuts to the host's samplers for the tests."""

from __future__ import annotations

from typing import Any

import comfy.patcher_extension as extension
import comfy.sample
import comfy.samplers
import torch
from harness import part
from torch import Tensor

CAPTION = "red circle left and blue square still on gray"
TWEAK = "green circle left and blue square still on gray"
SEED = 7
SHAPE = (1, 16, 4, 16, 16)
SMALL = (1, 16, 4, 8, 8)


def caption(text: str) -> list:
    """A conditioning of the demo model; empty text is the negative prompt."""
    captions = part("carnator.demo.captions")
    return [[captions.embed(captions.parse(text) if text else None)[None], {}]]


_counted: dict[str, int] = {}


def _count(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Free of state of its own, so that it looks the same to Carnator in every run."""
    _counted["calls"] = _counted.get("calls", 0) + 1
    return executor(*args, **kwargs)


class Calls:
    """A clone of a model whose evaluations are counted, at the model itself."""

    def __init__(self, model: Any):
        self.model = model.clone()
        self.model.add_wrapper_with_key(extension.WrappersMP.CALC_COND_BATCH, "test", _count)
        self.count = 0

    @property
    def count(self) -> int:
        return _counted["calls"] - self._before

    @count.setter
    def count(self, value: int) -> None:
        self._before = _counted.setdefault("calls", 0) - value


def sample(
    model: Any,
    text: str = CAPTION,
    *,
    sampler: str = "euler",
    cfg: float = 2.5,
    steps: int = 8,
    seed: int = SEED,
    latent: Tensor | None = None,
    callback: Any = None,
    shape: tuple[int, ...] = SMALL,
) -> Tensor:
    """What a KSampler node would give."""
    latent = torch.zeros(shape) if latent is None else latent
    torch.manual_seed(seed)
    noise = comfy.sample.prepare_noise(latent, seed)
    return comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler,
        "simple",
        caption(text),
        caption(""),
        latent,
        seed=seed,
        callback=callback,
        disable_pbar=True,
    )


def guider(model: Any, text: str = CAPTION, cfg: float = 2.5) -> comfy.samplers.CFGGuider:
    """What a CFG Guider node would give."""
    made = comfy.samplers.CFGGuider(model)
    made.set_conds(caption(text), caption(""))
    made.set_cfg(cfg)
    return made


def last_report() -> Any:
    return part("nodes.reports").find(None)


def flush(store: Any) -> None:
    """Wait until the store has written what was submitted."""
    store.open().flush()


def advanced(sampler: str = "euler", steps: int = 8, seed: int = SEED, model: Any = None) -> tuple:
    """Noise, sampler and sigmas as the host's custom sampling nodes make them."""
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise

    schedule = comfy.samplers.calculate_sigmas(
        model.get_model_object("model_sampling"), "simple", steps
    )
    return Noise_RandomNoise(seed), comfy.samplers.sampler_object(sampler), schedule


def empty(shape: tuple[int, ...] = SMALL) -> dict:
    return {"samples": torch.zeros(shape)}


def loose() -> Any:
    """Settings under which any donor of the same kind is good enough."""
    return part("carnator.request").Settings("custom", 10.0)
