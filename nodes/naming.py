"""What to call a run in front of a person: the words of its prompt, read from the graph being run.

The sampler is given embeddings. The words stand in the graph, some links before the sampler node,
and which graph and which node are running the host knows. Names are for people alone: nothing is
decided by them, and a run without one is called by its seed and time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

LONGEST = 200  # characters
DEEPEST = 32  # links followed
TOWARDS = ("positive", "conditioning", "guider", "cond")  # inputs that lead to the words, in order
AWAY = ("negative", "model", "vae", "clip", "latent", "noise", "sigmas", "sampler", "image", "mask")
WORDS = ("text", "prompt", "clip_l", "t5xxl", "string", "value")  # widgets that hold them

log = logging.getLogger("carnator")


def prompt_words() -> str:
    """The prompt of the sampler node that is running, on one line; empty where it is not found."""
    try:
        graph, node = running()
        words = next(found(graph, node), "")
    except Exception as error:  # a name is worth no generation
        log.debug("[Carnator] the run has no name (%s)", error)
        return ""
    words = " ".join(words.split())
    return words if len(words) <= LONGEST else words[: LONGEST - 3] + "..."


def running() -> tuple[Any, str]:
    """The graph that is running, nodes made on the way included, and the id of the node at work.

    Raises whatever the host raises where nothing is running.
    """
    from comfy_execution.progress import get_progress_state
    from comfy_execution.utils import get_executing_context

    context, state = get_executing_context(), get_progress_state()
    if context is None or state.prompt_id != context.prompt_id:
        raise LookupError("no node is running")
    return state.dynprompt, context.node_id


def found(graph: Any, node: str, depth: int = 0, seen: set[str] | None = None) -> Iterator[str]:
    """Texts behind a node, the nearest to its positive conditioning first."""
    seen = set() if seen is None else seen
    if depth > DEEPEST or node in seen or not graph.has_node(node):
        return
    seen.add(node)
    inputs = graph.get_node(node)["inputs"]
    if depth:
        for name in WORDS:
            value = inputs.get(name)
            if isinstance(value, str) and value.strip():
                yield value
    for name in sorted(inputs, key=_rank):
        link = inputs[name]
        if isinstance(link, list) and len(link) == 2 and _rank(name)[0] < len(TOWARDS) + 2:
            yield from found(graph, str(link[0]), depth + 1, seen)


def _rank(name: str) -> tuple[int, str]:
    """Where an input stands in the search; the highest number is left out of it."""
    lower = name.lower()
    if any(word in lower for word in AWAY) and lower not in WORDS:
        return len(TOWARDS) + 2, name
    for i, word in enumerate(TOWARDS):
        if word in lower:
            return i, name
    return len(TOWARDS) + (0 if lower in WORDS else 1), name
