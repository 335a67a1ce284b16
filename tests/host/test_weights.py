"""What lies on the weights: LoRAs, merges, other patchers, types, files. A wrong one never hits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_patcher
import comfy.sd
import pytest
import torch
from conftest import load
from harness import part
from sampling import CAPTION, SEED, SMALL, caption, flush, last_report, sample
from trial import attach, held, same, tried

HIT = ["miss", "hit", "exact"]
PREFIX = "diffusion_model.blocks.0."


def lora(seed: int, layer: str = "ffn.0") -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 in the host's file format."""
    rows, columns = {"ffn.0": (96, 48), "self_attn.q": (48, 48)}[layer]
    generator = torch.Generator().manual_seed(seed)
    name = f"{PREFIX}{layer}"
    return {
        f"{name}.lora_up.weight": torch.randn(rows, 2, generator=generator) * 0.1,
        f"{name}.lora_down.weight": torch.randn(2, columns, generator=generator) * 0.1,
    }


def with_lora(model: Any, held: dict[str, torch.Tensor], strength: float = 1.0) -> Any:
    """What a LoraLoader gives; each call loads the file anew, as a node that runs again does."""
    weights = {k: v.clone() for k, v in held.items()}
    return comfy.sd.load_lora_for_models(model, None, weights, strength, 0.0)[0]


@pytest.mark.parametrize("before", [False, True], ids=["after it", "before it"])
def test_a_lora_on_either_side_of_the_node(small_model, store, before):
    plain = with_lora(small_model, lora(1))
    ours = with_lora(attach(small_model, store), lora(1)) if before else attach(plain, store)
    assert not same(sample(plain), sample(small_model))
    assert tried(plain, ours, store) == HIT
    other = attach(plain, store) if before else with_lora(attach(small_model, store), lora(1))
    assert held(sample, plain, other, CAPTION).decision == "exact"  # the order does not matter


def test_other_loras_and_strengths_are_other_requests(small_model, store):
    """Judged by evidence like words; never taken for the same."""
    base = with_lora(small_model, lora(1))
    sample(attach(base, store))
    flush(store)
    both = with_lora(base, lora(2, "self_attn.q"))
    for changed in (
        small_model,
        with_lora(small_model, lora(1), 0.5),
        with_lora(small_model, lora(3)),
        with_lora(small_model, lora(1, "self_attn.q")),
        both,
    ):
        decision = held(sample, changed, attach(changed, store), CAPTION).decision
        assert decision in ("hit", "miss")
    assert held(sample, base, attach(base, store), CAPTION).decision == "exact"


def test_two_loras_in_any_order_of_nodes(small_model, store):
    one, two = lora(1), lora(2, "self_attn.q")
    plain = with_lora(with_lora(small_model, one), two)
    assert tried(plain, with_lora(attach(with_lora(small_model, one), store), two), store) == HIT


def test_a_stage_two_lora_does_not_leak_into_the_next_run(small_model, store):
    """Two nodes with different LoRAs on one model, run in turns."""
    first, second = with_lora(small_model, lora(1)), with_lora(small_model, lora(2))
    expected = [sample(first), sample(second)]
    for _ in range(2):
        for model, wanted in zip((first, second), expected, strict=True):
            report = held(sample, model, attach(model, store), CAPTION)
            assert report.decision in ("miss", "hit", "exact")
            assert report.decision == "hit" or same(sample(attach(model, store)), wanted)
        flush(store)


@pytest.mark.parametrize("bypass", ["LoraLoaderBypassModelOnly"])
def test_a_lora_in_bypass_mode(registry, small_model, store, monkeypatch, tmp_path, bypass):
    """The host keeps such a LoRA beside the weights, as injections."""
    import folder_paths
    from safetensors.torch import save_file

    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "loras", ([str(tmp_path)], {".safetensors"})
    )
    save_file(lora(1), tmp_path / "one.safetensors")
    save_file(lora(2), tmp_path / "two.safetensors")

    def patched(model: Any, name: str, strength: float = 1.0) -> Any:
        node = registry[bypass]()
        return getattr(node, node.FUNCTION)(
            model=model, lora_name=f"{name}.safetensors", strength_model=strength
        )[0]

    plain = patched(small_model, "one")
    decisions = tried(plain, attach(plain, store), store)
    assert decisions[0] == "miss" and decisions[1] == "hit"
    for changed in (patched(small_model, "two"), patched(small_model, "one", 0.3)):
        assert held(sample, changed, attach(changed, store), CAPTION).decision != "exact"


def test_hooks_with_keyframes_run_dense(small_model, store):
    """A LoRA that comes and goes during the run: the first evaluation cannot judge it."""
    weights = lora(1)
    hooks = comfy.hooks.create_hook_lora(weights, 1.0, 0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    frames.add(comfy.hooks.HookKeyframe(strength=1.0, start_percent=0.0))
    frames.add(comfy.hooks.HookKeyframe(strength=0.2, start_percent=0.5))
    hooks.set_keyframes_on_hooks(frames)

    def run(model: Any, words: str) -> torch.Tensor:
        import comfy.sample

        positive = comfy.hooks.set_hooks_for_conditioning(caption(words), hooks)
        latent = torch.zeros(SMALL)
        return comfy.sample.sample(
            model, comfy.sample.prepare_noise(latent, SEED), 8, 2.5, "euler", "simple", positive,
            caption(""), latent, seed=SEED, disable_pbar=True,
        )  # fmt: skip

    assert not same(run(small_model, CAPTION), sample(small_model))
    assert tried(small_model, attach(small_model, store), store, run) == ["dense"] * 3
    assert "hooks" in last_report().reason
    assert held(sample, small_model, attach(small_model, store), CAPTION).decision == "miss"


@pytest.mark.parametrize("node", ["ModelMergeSimple", "ModelMergeAdd", "ModelMergeSubtract"])
def test_merges(registry, small_model, other_model, store, node):
    def merged(first: Any, amount: float) -> Any:
        made = registry[node]()
        given = {"model1": first, "model2": other_model}
        if node == "ModelMergeSimple":
            given["ratio"] = amount
        if node == "ModelMergeSubtract":
            given["multiplier"] = amount
        return getattr(made, made.FUNCTION)(**given)[0]

    plain = merged(small_model, 0.8)
    assert not same(sample(plain), sample(small_model))
    assert tried(plain, attach(plain, store), store) == HIT
    again = merged(attach(small_model, store), 0.8)
    assert held(sample, plain, again, CAPTION).decision == "exact"
    if node != "ModelMergeAdd":
        other = merged(small_model, 0.6)
        assert held(sample, other, attach(other, store), CAPTION).decision in ("hit", "miss")


class Quantised(torch.Tensor):
    """Weights as packs for quantised files keep them: their storage is not their content."""

    @property
    def tensor_type(self) -> str:
        return "Q4_0"


class PackPatcher(comfy.model_patcher.ModelPatcher):
    """A patcher of another pack: its own clone, and no word of the file it came from."""

    patch_on_device = False

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made = super().clone(*args, **kwargs)
        made.__class__ = PackPatcher
        made.patch_on_device = self.patch_on_device
        made.cached_patcher_init = None
        return made


def test_patchers_of_other_packs(small_model, store):
    plain = small_model.clone()
    plain.__class__ = PackPatcher
    plain.cached_patcher_init = None
    ours = attach(plain, store)
    assert type(ours) is PackPatcher
    # Without a file nobody can say that a request is the same: close ones are hits all the same.
    assert tried(plain, ours, store) == ["miss", "hit", "hit"]


def test_the_patcher_of_dynamic_vram(small_file, store, monkeypatch):
    """The host's default patcher on a GPU, here on the CPU with empty pinned buffers: the node
    clones it plainly, so it stays what it is."""
    from types import SimpleNamespace

    dynamic = getattr(comfy.model_patcher, "ModelPatcherDynamic", None)
    if dynamic is None:
        pytest.skip("this host has no ModelPatcherDynamic")
    buffers = getattr(comfy.model_patcher, "comfy_aimdo", None)
    if hasattr(buffers, "host_buffer"):
        empty = SimpleNamespace(size=0)
        monkeypatch.setattr(buffers.host_buffer, "HostBuffer", lambda *_, **__: empty)
    # On a CPU the class makes plain patchers of itself.
    made = staticmethod(lambda cls, *_, **__: object.__new__(cls))
    monkeypatch.setattr(dynamic, "__new__", made)
    plain = load(small_file)
    plain.__class__ = dynamic
    plain.model.dynamic_vbars, plain.model.dynamic_pins = {}, {}
    plain.model.dynamic_patchers, plain.non_dynamic_delegate_model = set(), None
    if hasattr(plain, "register_load_device"):
        plain.register_load_device(plain.load_device)
    ours = attach(plain, store)
    assert type(ours) is dynamic and ours.is_dynamic()
    assert tried(plain, ours, store) == HIT


def test_quantised_patches_are_not_read(small_model, store):
    weight = torch.zeros(96, 48).as_subclass(Quantised)
    plain = small_model.clone()
    plain.patches[f"{PREFIX}ffn.0.weight"] = [(0.0, (weight,), 1.0, None, None)]
    assert tried(plain, attach(plain, store), store)[0] == "miss"
    assert part("nodes.weights").patches(plain) != part("nodes.weights").patches(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_types_of_weights(small_file, store, dtype):
    plain = part("nodes.host").with_shift(
        comfy.sd.load_diffusion_model(str(small_file), {"dtype": dtype}), 5.0
    )
    decisions = tried(plain, attach(plain, store), store)
    assert decisions[:2] == ["miss", "hit"] and decisions[2] in ("exact", "hit")


def test_the_callers_tensors_are_left_alone(small_model, store):
    """In float32 the host casts nothing, so what Carnator is given may be the caller's own."""
    latent = torch.randn(SMALL, generator=torch.Generator().manual_seed(3))
    noise = torch.randn(SMALL, generator=torch.Generator().manual_seed(4))
    positive, negative = caption(CAPTION), caption("")
    given = (latent, noise, positive[0][0], negative[0][0])
    before = [t.clone() for t in given]
    shown: list[torch.Tensor] = []

    def spoil(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> None:
        shown.append(denoised)
        if step == 2:
            denoised.mul_(0.5)  # a previewer that works in place, after the sampler read it

    import comfy.sample

    def run(model: Any, callback: Any = None) -> torch.Tensor:
        return comfy.sample.sample(
            model, noise, 8, 2.5, "heun", "simple", positive, negative, latent, seed=SEED,
            disable_pbar=True, callback=callback,
        )  # fmt: skip

    ours = attach(small_model, store)
    assert same(run(ours, spoil), run(small_model, spoil))
    flush(store)
    kept = [t.clone() for t in shown]
    run(ours)
    assert last_report().decision in ("exact", "hit", "miss")
    assert all(map(torch.equal, given, before)) and all(map(torch.equal, shown, kept))


# The file of a model, as an identity.


def decision(path: Path, store: Any) -> str:
    model = load(path)
    sample(attach(model, store))
    flush(store)
    return last_report().decision


def test_a_copied_renamed_or_touched_file_is_the_same_model(small_file, store, tmp_path):
    assert decision(small_file, store) == "miss"
    copy = tmp_path / "another name.safetensors"
    shutil.copy(small_file, copy)
    assert decision(copy, store) == "exact"
    os.utime(copy, (1, 1))
    assert decision(copy, store) == "exact"


def test_a_file_with_other_weights_is_another_model(small_file, store, tmp_path):
    """Same name, same size, same times: the content tells."""
    changed = tmp_path / small_file.name
    data = bytearray(small_file.read_bytes())
    for i in range(len(data) // 2, len(data) - 4, 4000):
        data[i] ^= 0x01
    changed.write_bytes(bytes(data))
    found = small_file.stat()
    os.utime(changed, ns=(found.st_atime_ns, found.st_mtime_ns))
    weights = part("nodes.weights").weights
    assert weights(load(changed)) != weights(load(small_file))
    assert decision(small_file, store) == "miss"
    assert decision(changed, store) in ("hit", "miss")


def test_a_file_that_is_gone_is_no_model_known(small_file, store, tmp_path):
    copy = tmp_path / "gone.safetensors"
    shutil.copy(small_file, copy)
    model = load(copy)
    copy.unlink()
    assert tried(model, attach(model, store), store) == ["miss", "hit", "hit"]


def test_only_a_part_of_a_file_is_read(tmp_path):
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(2**31)  # sparse: reading it all would show
        file.seek(2**31 - 1)
        file.write(b"x")
    digest, size = part("nodes.weights").file_digest, 2**31
    one = digest(str(big), size, 0)
    with big.open("r+b") as file:
        file.seek(2**31 - 1)
        file.write(b"y")
    assert digest(str(big), size, 1) != one
    assert digest(str(big), size, 0) == one  # kept, until size or time change
