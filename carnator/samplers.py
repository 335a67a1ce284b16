"""What Carnator may assume of each sampler: where it evaluates, and whether reuse is sound.

Names are those of the host's k-diffusion functions without ``sample_``. A sampler that is not
listed, or that departs from its contract while it runs, runs dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Calls = Callable[[Sequence[float]], list[float]]


def _one(sigmas: Sequence[float]) -> list[float]:
    return list(sigmas[:-1])


def _heun(sigmas: Sequence[float]) -> list[float]:
    out = []
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        out += [now] if after == 0 else [now, after]
    return out


def _dpm_2(sigmas: Sequence[float]) -> list[float]:
    out = []
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        out += [now] if after == 0 else [now, math.sqrt(now * after)]
    return out


@dataclass(frozen=True)
class Contract:
    """``kind`` picks the rows of the risk table: ``single`` (one evaluation a step, no history),
    ``second`` (two a step), ``multistep`` (one a step, with a history of earlier ones), or
    ``refused``. ``calls`` gives the sigma of every evaluation, ``why`` explains a refusal."""

    kind: str
    calls: Calls = _one
    why: str = ""


_NOISE = "it injects noise between its steps"
_CFG_PP = "it reads the unconditional result of every step"
_UP = "it goes back to earlier noise levels within a step"

CONTRACTS: dict[str, Contract] = {
    "euler": Contract("single"),
    "heun": Contract("second", _heun),
    "dpm_2": Contract("second", _dpm_2),
    "heunpp2": Contract("refused", why=_UP),
    "exp_heun_2_x0": Contract("refused", why="its noise levels rise by a rounding error in a step"),
    **{
        name: Contract("multistep")
        for name in (
            *("dpmpp_2m", "res_multistep", "unipc", "unipc_bh2", "uni_pc", "uni_pc_bh2"),
            *("deis", "ipndm", "ipndm_v", "lms", "gradient_estimation"),
        )
    },
    **{
        name: Contract("refused", why=_NOISE)
        for name in (
            *("euler_ancestral", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde", "lcm"),
            *("dpmpp_sde_gpu", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_3m_sde", "ddpm"),
            *("dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde_gpu"),
            *(
                "res_multistep_ancestral",
                "seeds_2",
                "seeds_3",
                "er_sde",
                "sa_solver",
                "sa_solver_pece",
                "exp_heun_2_x0_sde",
            ),
        )
    },
}


def contract(sampler: str, options: Mapping[str, float] | None = None) -> Contract:
    """The contract of a sampler with its options; unknown samplers are refused."""
    options = options or {}
    if sampler.endswith("cfg_pp"):
        return Contract("refused", why=_CFG_PP)
    known = CONTRACTS.get(sampler)
    if known is None:
        return Contract("refused", why="its behaviour is not known")
    if any(options.get(name) for name in ("s_churn", "eta")):
        return Contract("refused", why=_NOISE)
    return known


def schedule_fault(sigmas: Sequence[float]) -> str | None:
    """Why a schedule cannot be reused on, or None: it must fall strictly, be finite and positive
    but for a final zero, and have at least four steps."""
    if not all(math.isfinite(s) for s in sigmas):
        return "the schedule holds a sigma that is not finite"
    if len(sigmas) < 5:
        return f"a schedule of {max(0, len(sigmas) - 1)} steps leaves nothing to predict"
    if any(after >= now for now, after in zip(sigmas[:-1], sigmas[1:], strict=True)):
        return "the schedule does not fall monotonically in sigma"
    if sigmas[-2] <= 0 or sigmas[-1] < 0:
        return "the schedule reaches zero before its end"
    return None


def as_expected(expected: float, sigma: float) -> bool:
    """Whether a call came where the sampler's contract puts it (some clamp their last sigma)."""
    return abs(expected - sigma) <= 2e-3 * max(1.0, abs(expected))
