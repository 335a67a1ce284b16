"""Training of the embedded backbones: seeded, resumable at any checkpoint, no pickle.

Flow matching (Lipman et al., arXiv:2210.02747) with shifted logit-normal noise levels (Esser et
al., arXiv:2403.03206), a tenth of all captions dropped for classifier-free guidance, an
exponential moving average of the weights, and a warmup-stable-decay learning rate, so that a
resumed run may still be made longer.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from . import captions, clips, families
from .curve import write_curve
from .families import WAN, Family
from .recipe import Recipe

SIGMA_SHIFT = 3.0
CHECKPOINT_EVERY, LOG_EVERY = 100, 20
State = dict[str, Tensor]


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz iteration (Jordan et al., 2024), in fp32.

    torch.optim.Muon iterates in bf16, which is many times slower on a CPU without bf16 units.
    Updates are scaled to the size AdamW's would have (Liu et al., arXiv:2502.16982).
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("momentum", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(average, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonalise(g: Tensor, iterations: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix to g, roughly: quintic Newton-Schulz."""
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def batch_at(
    step: int, recipe: Recipe, family: Family = WAN
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents, text, sigmas and noise of one step; a function of the step and the seed alone."""
    rng = random.Random(f"carnator {recipe.seed} {step}")
    latents, texts = [], []
    for _ in range(recipe.batch):
        caption, clip = clips.training_pair(rng)
        latents.append(family.to_latent(clip))
        texts.append(captions.embed(None if rng.random() < recipe.drop_caption else caption))
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    clean = torch.stack(latents)
    sigma = torch.sigmoid(torch.randn(recipe.batch, generator=generator) + 0.3)
    sigma = SIGMA_SHIFT * sigma / (1 + (SIGMA_SHIFT - 1) * sigma)
    return clean, torch.stack(texts), sigma, torch.randn(clean.shape, generator=generator)


def optimizers(model: Any, rate: float) -> tuple[Optimizer, ...]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = model.matrices()
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    return Muon(matrices, rate), adam


def train(recipe: Recipe, config: Any, folder: Path, out: Path) -> None:
    """Train the backbone of a config and write ``out``; checkpoints, the loss log and its plot
    stay in ``folder``.

    Run again with the same folder, it goes on from the last checkpoint. The checkpoint that a
    decay of the rate began from is kept as ``before_decay.safetensors``: put in the place of
    ``checkpoint.safetensors``, it can be trained to another length.
    """
    torch.set_flush_denormal(True)
    folder.mkdir(parents=True, exist_ok=True)
    family = families.of_config(config)
    model = family.network(config)
    model.initialise(recipe.seed)
    average = {k: v.detach().clone() for k, v in model.state_dict().items()}
    tools = optimizers(model, recipe.rate)
    checkpoint = folder / "checkpoint.safetensors"
    start = load_checkpoint(checkpoint, model, average, tools) if checkpoint.exists() else 0
    compiled = torch.compile(model)
    bar = tqdm(range(start, recipe.steps), initial=start, total=recipe.steps, unit="step")
    log = (folder / "loss.jsonl").open("a")
    began = time.monotonic()
    for step in bar:
        clean, text, sigma, noise = batch_at(step, recipe, family)
        s = sigma.view(-1, 1, 1, 1, 1)
        velocity = compiled((1 - s) * clean + s * noise, sigma, text)
        loss = (velocity - (noise - clean)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            for group in tool.param_groups:
                group["lr"] = recipe.rate_at(step)
            tool.step()
            tool.zero_grad()
        keep = min(recipe.ema, (step + 1) / (step + 10))
        with torch.no_grad():
            for k, v in model.state_dict().items():
                average[k].lerp_(v, 1 - keep)
        if step % LOG_EVERY == 0:
            seconds = round(time.monotonic() - began, 1)
            log.write(json.dumps({"step": step, "loss": loss.item(), "seconds": seconds}) + "\n")
            log.flush()
            bar.set_postfix(loss=f"{loss.item():.4f}")
        done = step + 1
        decay_begins = done < recipe.steps and recipe.decay_from(done) == done
        if done % CHECKPOINT_EVERY == 0 or done == recipe.steps or decay_begins:
            save_checkpoint(checkpoint, model, average, tools, done)
        if decay_begins:
            shutil.copyfile(checkpoint, folder / "before_decay.safetensors")
    log.close()
    save_model(out, average, config)
    write_curve(folder / "loss.jsonl", folder / "loss.png", family.title)


def save_model(path: Path, state: dict[str, Tensor], config: Any) -> None:
    """Write weights in the format the host's diffusion-model loader takes."""
    metadata = {"config": json.dumps(config.host_config()), "format": "pt"}
    save_file({k: v.contiguous() for k, v in state.items()}, path, metadata=metadata)


def save_checkpoint(
    path: Path, model: nn.Module, average: State, tools: Sequence[Optimizer], step: int
) -> None:
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"average.{k}": v for k, v in average.items()}
    for i, tool in enumerate(tools):
        for j, state in tool.state_dict()["state"].items():
            tensors |= {f"tool.{i}.{j}.{k}": torch.as_tensor(v) for k, v in state.items()}
    fresh = path.with_suffix(".new")
    save_file({k: v.contiguous() for k, v in tensors.items()}, fresh, {"step": str(step)})
    fresh.replace(path)


def load_checkpoint(
    path: Path, model: nn.Module, average: State, tools: Sequence[Optimizer]
) -> int:
    with safe_open(path, "pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        step = int(file.metadata()["step"])
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
    for k in average:
        average[k].copy_(tensors[f"average.{k}"])
    for i, tool in enumerate(tools):
        state: dict[int, dict[str, Tensor]] = {}
        for name, v in tensors.items():
            if name.startswith(f"tool.{i}."):
                _, _, j, key = name.split(".")
                state.setdefault(int(j), {})[key] = v
        tool.load_state_dict({"state": state, "param_groups": tool.state_dict()["param_groups"]})
    return step
