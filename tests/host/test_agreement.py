"""The embedded backbone and the host's own Wan model are one and the same function."""

from __future__ import annotations

import torch
from harness import hand_over, part
from sampling import CAPTION, SHAPE, caption, last_report, sample


def test_one_forward_agrees(demo_file, demo_model):
    import comfy.model_management

    embedded = part("carnator.demo.model").EmbeddedModel.load(demo_file)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator)
    comfy.model_management.load_models_gpu([demo_model])
    network = demo_model.model.diffusion_model
    with torch.no_grad():
        for text in (CAPTION, ""):
            context = caption(text)[0][0]
            for sigma in (1.0, 0.6, 0.05):
                ours = embedded.network(x, torch.tensor([sigma]), context)
                theirs = network(x, torch.tensor([sigma * 1000]), context=context)
                assert (ours - theirs).abs().max() < 1e-5


def test_a_whole_run_agrees(demo_file, demo_model, store, tmp_path):
    """A dense run and then one accepted from the same donor, here and there: same latents to 1e-3.
    With a donor each of their own a last bit could decide between two of 16 levels in its record.
    """
    from carnator.demo import captions
    from carnator.demo import host as embedded
    from carnator.demo.model import EmbeddedModel
    from carnator.request import Settings
    from carnator.store import Store

    model = EmbeddedModel.load(demo_file)
    ours = part("nodes.host").attach(demo_model, part("carnator.request").Settings(), store)
    with Store(tmp_path / "embedded") as records:
        for text in (CAPTION, CAPTION.replace("still", "up")):
            result = embedded.generate(
                model,
                captions.parse(text),
                cfg=2.5,
                seed=7,
                settings=Settings(),
                store=records,
            )
            records.flush()
            latent = sample(ours, text, steps=embedded.STEPS, cfg=2.5, shape=SHAPE)
            store.open().flush()
            assert result.report is not None
            report = last_report()
            assert report.decision == result.report.decision
            assert report.evaluations == result.report.evaluations
            inside = part("nodes.host").model_space(demo_model, latent)
            assert (inside - result.latent).abs().max() < 1e-3
            if report.decision == "miss":
                hand_over(records, store.open())
    assert report.decision == "hit"
