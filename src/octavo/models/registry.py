"""Which architecture is built by what, and how a checkpoint becomes a model. Knows no kernels and no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.models import gemma3, gpt2, llama, mistral, opt, phi3, qwen2, qwen3
from octavo.models.interface import Model
from octavo.models.layers import Decoder
from octavo.models.settings import Settings
from octavo.models.weights import Weights
from octavo.ops.interface import Ops

if TYPE_CHECKING:
    from octavo.loading.checkpoint import Checkpoint

Builder = Callable[[Settings, Weights, Ops, int], Decoder]

_BUILDERS: dict[str, Builder] = {
    "llama": llama.build,
    "mistral": mistral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "gemma3_text": gemma3.build,
    "phi3": phi3.build,
    "gpt2": gpt2.build,
    "opt": opt.build,
}
_LEARNED_POSITIONS = ("gpt2", "opt")
_UNNEEDED = {  # the parts of a picture-reading Gemma that text does not pass through
    "gemma3_text": ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
}


def build(checkpoint: Checkpoint, ops: Ops, max_positions: int | None = None) -> Model:
    """The checkpoint's model, its weights given to `ops`, for sequences of up to `max_positions` tokens.

    None means the longest context of training. Rotary models go beyond it if asked (their answers need not be any
    good); those with learned positions cannot.

    Raises ModelError, naming the tensor, or the key and its value, for what is missing, misshapen or not supported,
    and for tensors that the model would not use.
    """
    architecture = checkpoint.architecture
    if architecture not in _BUILDERS:
        raise ModelError(f"{checkpoint.name} is a {architecture} model; supported are {', '.join(_BUILDERS)}.")
    config = Settings(checkpoint.name, checkpoint.config)
    trained = config.whole("max_position_embeddings")
    if architecture in _LEARNED_POSITIONS and max_positions is not None and max_positions > trained:
        raise ModelError(f"{checkpoint.name} has learned {trained} positions and cannot take {max_positions}.")
    weights = Weights(checkpoint, ops)
    model = _BUILDERS[architecture](config, weights, ops, max_positions or trained)
    weights.refuse_unused(_UNNEEDED.get(architecture, ()))
    return ops.compile(model)
