"""Work split over threads, as the host does it for several GPUs, simulated on one device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import comfy.patcher_extension as extension
import comfy.samplers
import pytest
import torch
from harness import part
from sampling import CAPTION, TWEAK, flush, last_report, sample
from trial import attach, held, same, tried

HIT = ["miss", "hit", "exact"]


def in_threads(executor: Any, model: Any, conds: Any, *rest: Any) -> Any:
    """A ``CALC_COND_BATCH`` wrapper that evaluates every branch in a thread of its own and marks
    the device, as the host's multi-GPU path does."""
    x, timestep, options = rest
    seen = []

    def work(number: int, cond: Any) -> Any:
        inner = {**options["transformer_options"], "multigpu_thread_device": f"cpu:{number}"}
        seen.append(threading.get_ident())
        with torch.inference_mode():
            return executor(model, [cond], x, timestep, {**options, "transformer_options": inner})[
                0
            ]

    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda pair: None if pair[1] is None else work(*pair), enumerate(conds))
        )
    return [torch.zeros_like(x) if part_ is None else part_ for part_ in found]


def test_branches_in_threads_of_their_own(small_model, store):
    model = small_model.clone()
    model.add_wrapper_with_key(extension.WrappersMP.CALC_COND_BATCH, "threads", in_threads)
    assert same(sample(model), sample(model))
    assert tried(model, attach(model, store), store) == HIT
    (entry, *_) = store.open().entries()
    assert entry.meta["branched"]


def test_the_hosts_own_split_runs_dense(small_model, store, registry):
    """With more than one device the host keeps clones of the model; that is what is looked for."""
    model = small_model.clone()
    model.additional_models["multigpu"] = [small_model.clone()]
    ours = attach(model, store)
    request, refusals = part("nodes.request"), part("nodes.refusals")
    from sampling import SMALL, guider

    made = guider(ours)
    made.conds = made.original_conds
    noise, euler = torch.zeros(SMALL), comfy.samplers.sampler_object("euler")
    with pytest.raises(refusals.Unsupported, match="several GPUs"):
        request.read_request(made, noise, noise, euler, torch.linspace(1, 0, 9), None, 0)
    node = registry.get("MultiGPU_WorkUnits")
    if node is not None:  # with one device it changes nothing
        split = node.execute(model=small_model, max_gpus=2)[0]
        assert tried(split, attach(split, store), store) == HIT


def test_two_prompts_at_once_on_one_store(small_model, other_model, store):
    """Two servers' workers, here two threads: each run's state is its own."""
    models = [attach(small_model, store), attach(other_model, store)]
    expected = [sample(small_model), sample(other_model)]
    got: list[Any] = [None, None]

    def work(number: int) -> None:
        with torch.inference_mode():
            got[number] = [run_alone(models[number]) for _ in range(3)]

    lock = threading.Lock()

    def run_alone(model: Any) -> torch.Tensor:
        with lock:  # the host samples one at a time; the store's writers do not wait
            return sample(model)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(same(latent, expected[n]) for n in (0, 1) for latent in got[n])
    flush(store)
    held(sample, small_model, models[0], TWEAK)
    assert last_report().decision == "hit"


def test_latents_on_another_device_than_the_record(small_model, store, monkeypatch):
    """A donor's tensors lie on the CPU and are moved to where the run is; a device that only
    looks like another one shows that nothing is taken along from where it was."""
    ours = attach(small_model, store)
    sample(ours)
    flush(store)
    trajectory = part("carnator.trajectory").Trajectory
    moved: list[Any] = []
    original = trajectory.to

    def watched(self: Any, device: Any) -> Any:
        moved.append(torch.device(device))
        return original(self, device)

    monkeypatch.setattr(trajectory, "to", watched)
    assert held(sample, small_model, ours, TWEAK).decision == "hit"
    assert moved == [torch.device("cpu")]
    assert held(sample, small_model, ours, CAPTION).decision == "exact"
