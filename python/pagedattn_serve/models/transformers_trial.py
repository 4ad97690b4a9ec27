"""What a model of transformers asks of attention, seen in a trial run without weights; and whether the ops can give it.

A model must not run if it keeps something else than keys and values between tokens, or if it attends in a way that the
ops do not know: its results would be wrong. A config does not say so reliably. So the model runs on the "meta" device,
each layer's call of attention is looked at, and what is not understood is refused by name.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pagedattn_ext.kv_cache import MAX_HEAD_SIZE
from pagedattn_serve.models.latent_attention import is_latent
from pagedattn_serve.models.transformers_positions import CACHE_ARGUMENTS, position_arguments
from pagedattn_serve.models.transformers_states import LinearUse, TrialCache, mixers, watch_linear_layers

TRIAL = "pagedattn_trial"  # the name of `record` and `describe_mask` in transformers' registers
NUM_TOKENS = 3
# What a layer may tell its attention function beside query, key, value and mask. Every other argument must be None.
HONOURED = {"scaling", "sliding_window", "softcap", "s_aux"}
WITHOUT_EFFECT = {"position_ids", "cache_position", "logits_to_keep"}  # the first two find sequences for kernels
WITH_STATES = {"linear_attention", "conv", "hybrid"}  # types of layers with a mixer; hybrid ones attend as well
FEED_FORWARD = {"mlp", "moe"}  # types of layers that keep nothing between tokens
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *WITH_STATES, *FEED_FORWARD}

NO_POSITIONS = "its forward takes no position_ids, and does not count on from the tokens in its cache for each row"


class Refusal(Exception):
    """Why a model cannot run, as the end of a sentence."""


@dataclass(slots=True, frozen=True)
class AttentionShape:
    """What one layer asks of attention. Sizes are sizes of a head.

    writer: the layer whose keys and values it attends to: itself, or an earlier one.
    sliding_window, attention_chunk: as in `ops.paged_attention`.
    is_latent: whether values are part of the keys, which are latents of all heads with the rotary parts.
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    writer: int
    sliding_window: int | None
    attention_chunk: int
    is_latent: bool

    @property
    def head_size(self) -> int:
        """Of the cache, in which a narrower value is padded."""
        return max(self.key_size, self.value_size)

    @property
    def window(self) -> int | None:
        """Tokens up to a row's own that the row sees, at most; None: all. A chunk shows so many to its last token."""
        return self.sliding_window or self.attention_chunk or None


@dataclass(slots=True, frozen=True)
class TrialMask:
    """Stands in the place of a mask, and keeps the arguments that the mask was asked for with."""

    sees: Callable[..., Tensor]  # of batch, head, query and key index
    local_size: int  # the size of its windows or chunks; 0: it has neither


class Trial:
    """What the layers of a model ask of attention, by layer; which states they keep; and how linear layers are used."""

    is_alone = False  # for mixers (`MixerForward`): this is a trial, and no call by transformers alone
    is_trial = True

    def __init__(self) -> None:
        self.shapes: dict[int, AttentionShape] = {}
        self.keys_and_values: dict[int, tuple[Tensor, Tensor]] = {}
        self.mixer_cache = TrialCache()
        self.linear_use = LinearUse([], [], [])
        self._is_in_mixer = False

    @contextmanager
    def within_mixer(self, layer: int) -> Iterator[None]:
        """While the mixer of a layer runs."""
        if layer in {key.layer for key in self.mixer_cache.shapes()}:
            raise Refusal(f"layer {layer} changes its state twice")
        self._is_in_mixer = True
        yield
        self._is_in_mixer = False

    def record(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]
    ) -> None:
        layer = module.layer_idx
        if layer in self.shapes:
            raise Refusal(f"layer {layer} calls attention twice")
        if self._is_in_mixer:
            raise Refusal(f"layer {layer} attends where it changes its state")
        if query.shape[0] != 1 or query.shape[2] != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
            raise Refusal(f"layer {layer} attends to something else than the tokens of its sequence")
        is_causal = options.pop("is_causal", None)
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise Refusal(f"layer {layer} attends to later tokens, too")
        if dropout := options.pop("dropout", 0.0):
            raise Refusal(f"layer {layer} has a dropout of {dropout}")
        for name, option in options.items():
            if name not in HONOURED | WITHOUT_EFFECT and option is not None and option is not False:
                raise Refusal(f"layer {layer} hands {name} to attention, which the ops do not know")
        for name in HONOURED - {"scaling"}:
            if is_latent(module) and options.get(name) is not None:
                raise Refusal(f"layer {layer} hands {name} to attention, which latent attention does not know")
        window = options.get("sliding_window")
        chunk = check_mask(layer, mask, window)
        earlier = [of for of, (k, v) in self.keys_and_values.items() if k is key and v is value]
        writer = earlier[0] if earlier else layer
        self.keys_and_values[layer] = key, value
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        self.shapes[layer] = AttentionShape(*sizes, writer, window, chunk, is_latent(module))


def record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers that computes nothing."""
    if not isinstance(getattr(module, "pagedattn", None), Trial):
        raise Refusal("it calls attention from what is none of its layers")
    module.pagedattn.record(module, query, key, value, attention_mask, options)
    value_size = module.v_head_dim if is_latent(module) else value.shape[3]
    return query.new_empty(1, query.shape[2], query.shape[1], value_size), None


def describe_mask(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> TrialMask:
    """A mask function for transformers that makes no mask."""
    return TrialMask(mask_function, local_size or 0)


AttentionInterface.register(TRIAL, record)
AttentionMaskInterface.register(TRIAL, describe_mask)


class ZerosForMeta(TorchFunctionMode):
    """Tensors on "meta" are read as zeros: a mask may read how many tokens of padding come first. There are none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def read(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_meta:
                return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            return value

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


def check_mask(layer: int, mask: object, sliding_window: int | None) -> int:
    """The number of tokens of the mask's chunks; 0: it has none. Raises Refusal unless the mask shows what the ops
    show: `sliding_window` tokens, the earlier tokens of a chunk, or all earlier tokens."""
    if mask is None:  # the layer leaves all to `is_causal`
        return 0
    if not isinstance(mask, TrialMask):
        raise Refusal(f"layer {layer} has a mask of its own making")
    with torch.device("cpu"):
        size = max(mask.local_size, sliding_window or 0, NUM_TOKENS)
        rows = torch.tensor([[0], [1], [size - 1], [size], [size + 1], [2 * size], [3 * size - 1]])
        keys = torch.arange(3 * size)
        expected = (keys <= rows) & (keys > rows - (sliding_window or 3 * size))
        with ZerosForMeta():
            sees = mask.sees(torch.tensor(0), torch.tensor(0), rows, keys).expand_as(expected)
        if torch.equal(sees, expected):
            return 0
        chunk = mask.local_size
        if sliding_window is None and chunk and torch.equal(sees, expected & (keys // chunk == rows // chunk)):
            return chunk
    window = f"a window of {sliding_window} tokens" if sliding_window else "all earlier tokens"
    raise Refusal(f"the mask of layer {layer} shows something else than {window}")


def run_trial(model: PreTrainedModel, config: Any) -> Trial:
    """What each layer of `model` asks of attention, and keeps. The model is on "meta" and has the text config `config`.
    Raises Refusal for what cannot run. Raises any other exception if the model expects a mask, or numbers."""
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise Refusal(f"it has layers of type {min(unknown)}")
    trial = Trial()
    give_to_layers(model, trial)
    token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    # Without a mask, positions are searched for several sequences. Models with mixers look at the mask's values.
    attention_mask = torch.ones_like(token_ids, device="cpu" if mixers(model) else "meta")
    inputs = dict(
        input_ids=token_ids,
        attention_mask=attention_mask,
        use_cache=False,
        logits_to_keep=torch.arange(NUM_TOKENS, device="meta"),
    )
    if not mixers(model) or "position_ids" in signature(model.forward).parameters:
        inputs |= position_arguments(model)(torch.arange(NUM_TOKENS, device="meta"))
    with watch_linear_layers(model) as trial.linear_use, without_checks_of_distributions(), without_advice():
        try:
            model(**inputs)
        except Exception as error:
            if inputs.keys() & CACHE_ARGUMENTS and not isinstance(error, Refusal):
                raise Refusal(NO_POSITIONS) from error
            raise
    with_states = {key.layer for key in trial.mixer_cache.shapes()}
    if not trial.shapes and not with_states:
        raise Refusal("its layers do not call transformers' attention interface")
    layer_types = getattr(config, "layer_types", None) or ()
    if with_states:
        without_mixer = {layer for layer, type in enumerate(layer_types) if type in WITH_STATES} - with_states
        if without_mixer:
            raise Refusal(f"layer {min(without_mixer)}, of type {layer_types[min(without_mixer)]}, has no known state")
    num_idle = sum(type in FEED_FORWARD for type in layer_types)
    layers = trial.shapes.keys() | with_states
    if len(layers) + num_idle != config.num_hidden_layers or not layers <= set(range(config.num_hidden_layers)):
        raise Refusal(f"of its {config.num_hidden_layers} layers, {len(layers)} attend to keys and values")
    head_sizes = [shape.head_size for shape in trial.shapes.values() if not shape.is_latent]
    if (size := max(head_sizes, default=0)) > MAX_HEAD_SIZE:
        raise Refusal(f"its heads of size {size} are larger than the ops know, up to {MAX_HEAD_SIZE}")
    uses_windows = getattr(config, "layer_types", None) is not None or {
        shape.sliding_window for shape in trial.shapes.values()
    } != {None}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if not uses_windows and window is not None and window < config.max_position_embeddings:
        # Without this, transformers' cache would drop tokens behind the window, even where layers have no window.
        raise Refusal(f"its config has a sliding_window of {window}, which its layers do not use")
    return trial


@contextmanager
def without_checks_of_distributions() -> Iterator[None]:
    """torch.distributions, which Gemma 3n takes a threshold from, looks at no values, as there are none."""
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


@contextmanager
def without_advice() -> Iterator[None]:
    """transformers does not advise to install other kernels for mixers, which run on the ops here."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    logger.addFilter(is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(is_no_advice)


def is_no_advice(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def give_to_layers(model: PreTrainedModel, state: object) -> None:
    """Put what the attention function needs into the modules of this model, where no other model finds it."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.pagedattn = state
            if module.layer_idx in (None, -1):  # Zamba's attention
                module.register_forward_pre_hook(note_layer, with_kwargs=True)


def note_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For an attention module that is told its layer when it is called."""
    module.layer_idx = kwargs.get("layer_idx", module.layer_idx)
