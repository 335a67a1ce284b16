"""The host's own text-to-video templates with the Accelerate node before their samplers.

Whole graphs are validated as the server does it. What leads to the samplers is executed, with tiny
random weights under the templates' file names and small sizes; the text encoders and VAEs, which
have no small form in the host, are replaced by stand-ins of the same sockets.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import folder_paths
import pytest
import templates
import tiny
import torch
from machine import Machine, node, report_in, validated
from safetensors.torch import save_file
from trial import FLOOR, psnr, same

import nodes

SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
MODEL_USERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "CFGGuider", "BasicGuider")
STEPS = ("KSampler", "KSamplerAdvanced", "BasicScheduler", "LTXVScheduler")
HIT, DENSE = ("miss", "hit"), ("dense", "dense")


@dataclass(frozen=True)
class Template:
    """A family's template; ``decisions`` are those of each sampler on a first run and after a
    changed word. ``small`` are inputs by node type that make it fit to be executed here."""

    name: str
    family: str
    small: dict[str, dict[str, Any]]
    decisions: tuple[tuple[str, str], ...] = (HIT,)
    reason: str = ""


SMALL = {"width": 64, "height": 64, "length": 13}
TEMPLATES = {
    "Wan 2.1": Template("text_to_video_wan", "wan", {"EmptyHunyuanLatentVideo": SMALL}),
    "Wan 2.2 14B": Template(
        "video_wan2_2_14B_t2v", "wan", {"EmptyHunyuanLatentVideo": SMALL}, (HIT, HIT)
    ),
    "HunyuanVideo": Template(
        "hunyuan_video_text_to_video", "hunyuan", {"EmptyHunyuanLatentVideo": SMALL}
    ),
    "HunyuanVideo 1.5": Template(
        "video_hunyuan_video_1.5_720p_t2v", "hunyuan15", {"EmptyHunyuanVideo15Latent": SMALL}
    ),
    "LTX-Video": Template(
        "ltxv_text_to_video",
        "ltx",
        {"EmptyLTXVLatentVideo": {"width": 128, "height": 128, "length": 17}},
    ),
    "LTX-2": Template(
        "video_ltx2_t2v",
        "ltxav",
        {
            "EmptyImage": {"width": 256, "height": 256},
            "EmptyLTXVLatentVideo": {"length": 9},
            "LTXVEmptyLatentAudio": {"frames_number": 9},
        },
        (DENSE, DENSE),
        "audio and video",
    ),
    "Kandinsky 5": Template(
        "video_kandinsky5_t2v",
        "kandinsky5",
        {"Kandinsky5ImageToVideo": SMALL},
        (DENSE,),
        "injects noise",
    ),
    "MiniMax H3": Template(
        "video_minimax_h3_t2v",
        "minimax_h3",
        {"MiniMaxH3ImageToVideo": {"width": 64, "height": 64, "length": 5}},
        (DENSE,),
        "audio and video",
    ),
}
every_template = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


class Words:
    """What the templates ask of a text encoder."""

    def __init__(self, family: str):
        self.family = family

    def tokenize(self, text: str, **_: Any) -> str:
        return text

    def encode_from_tokens_scheduled(self, text: str, **_: Any) -> list:
        return tiny.text(self.family, text)


def stand_in(output: str, give: Any, **inputs: Any) -> type:
    """A node with one output that ``give`` makes of its inputs."""

    class StandIn:
        RETURN_TYPES, FUNCTION, CATEGORY = (output,), "give", "test"

        @classmethod
        def INPUT_TYPES(cls) -> dict:
            return {"required": dict(inputs)}

        def give(self, **given: Any) -> tuple:
            return (give(**given),)

    return StandIn


def larger(samples: dict) -> dict:
    """Twice as wide and high."""
    return {"samples": samples["samples"].repeat_interleave(2, -1).repeat_interleave(2, -2)}


def audio_vae() -> Any:
    _, channels, tokens, bins = tiny.FAMILIES["ltxav"].audio
    given = {
        "latent_channels": channels,
        "sample_rate": 16_000,
        "latent_frequency_bins": bins,
        "num_of_latents_from_frames": lambda *_: tokens,
    }
    return SimpleNamespace(**given, first_stage_model=SimpleNamespace(**given))


KEPT: dict[str, Any] = {}


class Keep:
    """An output node that keeps a latent for the test to look at."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "keep", "test", True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"latent": ("LATENT",), "name": ("STRING", {})}}

    def keep(self, latent: dict, name: str) -> dict:
        KEPT[name] = latent["samples"]
        return {}


STAND_INS = {
    "TestText": stand_in("CLIP", Words, family=("STRING", {})),
    "TestVAE": stand_in("VAE", lambda: None),
    "TestAudioVAE": stand_in("VAE", audio_vae),
    "TestUpsampler": stand_in("LATENT", larger, samples=("LATENT",)),
    "TestKeep": Keep,
}


@pytest.fixture
def prompt_of(registry, monkeypatch, tmp_path):
    """Makes a template's prompt, with an empty file for every model it names."""
    for name, kind in STAND_INS.items():
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, kind)
    silent = SimpleNamespace(send_progress_text=lambda *_: None)
    monkeypatch.setattr(sys.modules["server"].PromptServer, "instance", silent, raising=False)

    def files(workflow: dict) -> dict:
        for folder, name in templates.models(workflow):
            place = tmp_path / "models" / folder
            place.mkdir(parents=True, exist_ok=True)
            (place / name).touch()
            known = ([str(place)], {".safetensors"})
            monkeypatch.setitem(folder_paths.folder_names_and_paths, folder, known)
        folder_paths.filename_list_cache.clear()
        return workflow

    def make(template: Template) -> dict:
        try:
            return templates.to_prompt(files(templates.find(template.name)), registry)
        except FileNotFoundError:
            pytest.skip(f"the template package of this host has no {template.name}")
        except LookupError as missing:
            pytest.skip(f"this host lacks nodes of the template: {missing}")

    make.files = files
    yield make
    folder_paths.filename_list_cache.clear()


def accelerated(prompt: dict, store: Any) -> dict:
    """The graph with the Accelerate node on every model, after its last patch, and a Report node
    behind every sampler."""
    made = copy.deepcopy(prompt)
    made["store"] = node("CarnatorStore", where=str(store.folder), size_gb=1.0)
    for number, user in prompt.items():
        if user["class_type"] in MODEL_USERS:
            made[number]["inputs"]["model"] = [f"{number}-carnator", 0]
            made[f"{number}-carnator"] = node(
                "CarnatorAccelerate",
                model=user["inputs"]["model"],
                preset="custom",
                noise_policy="keep",
                enabled=True,
                budget_db=FLOOR,
                record=True,
                exact_hits=True,
                sparse_attention="off",
                store=["store", 0],
            )
    for number in samplers(prompt):
        made[f"{number}-report"] = node("CarnatorReport", latent=[number, 0])
    return made


def samplers(prompt: dict) -> list[str]:
    """The samplers, earlier ones before those that go on from them."""

    def depth(number: str) -> int:
        links = [v for v in prompt[number]["inputs"].values() if isinstance(v, list)]
        return 1 + max((depth(link[0]) for link in links), default=0)

    return sorted((n for n in prompt if prompt[n]["class_type"] in SAMPLERS), key=depth)


@every_template
def test_the_server_accepts_it(prompt_of, store, template):
    """The whole graph, as the template is, and with the node in it."""
    plain = prompt_of(template)
    outputs = validated(plain)
    ours = accelerated(plain, store)
    reports = [f"{number}-report" for number in samplers(plain)]
    assert sorted(validated(ours)) == sorted([*outputs, *reports])
    assert len(reports) == len(template.decisions)
    users = [n for n in ours.values() if n["class_type"] == "CarnatorAccelerate"]
    assert len(users) == len(reports)


def executable(prompt: dict, template: Template) -> dict:
    """What leads to the samplers, small, with a look at every sampler's latent."""
    made = copy.deepcopy(prompt)
    for item in made.values():
        kind, inputs = item["class_type"], item["inputs"]
        inputs.update(template.small.get(kind, {}))
        if kind in ("CLIPLoader", "DualCLIPLoader", "LTXAVTextEncoderLoader"):
            item.update(node("TestText", family=template.family))
        elif kind == "VAELoader":
            item.update(node("TestVAE"))
        elif kind == "LTXVAudioVAELoader":
            item.update(node("TestAudioVAE"))
        elif kind == "LTXVLatentUpsampler":
            item.update(node("TestUpsampler", samples=inputs["samples"]))
    for number in samplers(prompt):
        made[f"{number}-kept"] = node("TestKeep", latent=[number, 0], name=number)
    wanted, found = [f"{number}-kept" for number in samplers(prompt)], {}
    while wanted:
        number = wanted.pop()
        found[number] = made[number]
        links = [v[0] for v in made[number]["inputs"].values() if isinstance(v, list)]
        wanted += [link for link in links if link not in found]
    return found


def with_weights(prompt: dict, family: str) -> None:
    """Put tiny random weights where the prompt's loaders look for their files."""
    seeds = iter(range(9))
    for item in prompt.values():
        kind, inputs = item["class_type"], item["inputs"]
        if kind == "UNETLoader":
            place = folder_paths.get_full_path("diffusion_models", inputs["unet_name"])
            tiny.write(family, tiny.Path(place), next(seeds))
        elif kind == "CheckpointLoaderSimple":
            place = folder_paths.get_full_path("checkpoints", inputs["ckpt_name"])
            tiny.write(family, tiny.Path(place), next(seeds), "model.diffusion_model.")
        elif kind == "LoraLoaderModelOnly":
            place = folder_paths.get_full_path("loras", inputs["lora_name"])
            weights = tiny.network(family).state_dict()
            name = next(k for k, v in weights.items() if "blocks" in k and v.ndim == 2)
            rows, columns = weights[name].shape
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            up, down = torch.full((rows, 1), 0.01), torch.ones(1, columns)
            save_file({f"{key}.lora_up.weight": up, f"{key}.lora_down.weight": down}, place)


def changed_word(prompt: dict) -> dict:
    """The prompt with another third word in its longest text."""
    made = copy.deepcopy(prompt)
    texts = [
        (len(value), number, name)
        for number, item in made.items()
        for name, value in item["inputs"].items()
        if isinstance(value, str) and item["class_type"] != "CarnatorStore"
    ]
    _, number, name = max(texts)
    words = made[number]["inputs"][name].split()
    made[number]["inputs"][name] = " ".join([*words[:2], "purple", *words[3:]])
    return made


def latents(prompt: dict) -> list[Any]:
    KEPT.clear()
    Machine().run(prompt)
    return [KEPT[number] for number in samplers(prompt)]


@every_template
def test_it_runs_and_reuses_or_says_why_not(prompt_of, store, template):
    prompt = prompt_of(template)
    try:
        tiny.network(template.family)
    except ImportError:
        pytest.skip(f"this host has no model code for {template.family}")
    plain = executable(prompt, template)
    with_weights(plain, template.family)
    machine, numbers = Machine(), samplers(plain)
    decisions = []
    for words in (plain, changed_word(plain)):
        expected = latents(words)
        ours, KEPT["end"] = accelerated(words, store), None
        outputs = machine.run(ours)
        store.open().flush()
        reports = [report_in(outputs, f"{number}-report") for number in numbers]
        decisions.append([report["decision"] for report in reports])
        for number, report, wanted in zip(numbers, reports, expected, strict=True):
            assert template.reason in report["reason"]
            if "hit" in decisions[-1]:
                assert psnr(KEPT[number], wanted) >= FLOOR, report
            else:
                assert same(KEPT[number], wanted), report
    assert list(zip(*decisions, strict=True)) == list(template.decisions)
