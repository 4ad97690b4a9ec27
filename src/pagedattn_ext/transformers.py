"""transformers on the paged ops: its continuous batching, and its attention by flash-attn's names.

    model = AutoModelForCausalLM.from_pretrained(...)
    use_paged_attention(model)
    outputs = model.generate_batch(prompts)

    use_flash_attention()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flash_attention_2")
    outputs = model.generate(prompts)

`import pagedattn_ext` leaves this module out, because it needs transformers of the versions FIRST to LAST. It
subclasses what transformers does not promise to keep, so with another version the import raises ImportError.
"""

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import modeling_flash_attention_utils

from . import flash_attn, ops, padded_head_size
from ._C import MAX_BLOCK_SIZE, MAX_HEAD_SIZE

FIRST, LAST = (5, 19), (5, 24)  # the minor versions that tests/test_transformers.py was run with

if not FIRST <= tuple(map(int, transformers.__version__.split(".")[:2])) <= LAST:
    raise ImportError(
        f"pagedattn_ext.transformers: expected transformers {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]} (pip install "
        f'"transformers<{LAST[0]}.{LAST[1] + 1}"), '
        f"got {transformers.__version__}"
    )

from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402
from transformers.generation.continuous_batching.continuous_api import (  # noqa: E402
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (  # noqa: E402
    resolve_using_hints,
    resolve_without_hints,
)
from transformers.generation.continuous_batching.utils import WorkloadHints, find_head_dim  # noqa: E402
from transformers.integrations import flash_attention  # noqa: E402

__all__ = ["use_flash_attention", "use_paged_attention"]

NAME = "pagedattn_flash"  # "flash" tells transformers that this attention takes no masks, so that it builds none
FULL_ATTENTION = "full_attention"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLANNED_BY = {"head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads", "sliding_window"}


def use_paged_attention(model: transformers.PreTrainedModel) -> None:
    """From now on `model.generate_batch`, and all of transformers' continuous batching, runs on the paged ops.

    The ops run on the device of the model, CPU or CUDA, in fp32, fp16 or bf16. The model itself stays as it is: its
    forward and `generate` run on its own attention, with gradients. While a continuous batching manager of the model
    runs, forward and `generate` raise RuntimeError. Other models are not touched. A second call changes nothing.

    In a ContinuousBatchingConfig, page_size must be a power of two from 4 to 256. CUDA graphs and torch.compile raise
    ValueError. auto_switch_to_flash has no effect. Layers with a sliding window keep all tokens in the cache.

    Raises TypeError for what is not a model of transformers. Raises ValueError for a model with a layer that is not
    causal attention through transformers' AttentionInterface: recurrent, encoder-decoder, chunked, with ALiBi; or with
    layers whose heads or windows differ by the config.
    """
    _check_model(model)
    model.destroy_cached_continuous_batching_manager()  # a cached manager would go on with another attention
    model.init_continuous_batching = MethodType(init_continuous_batching, model)


def use_flash_attention() -> None:
    """From now on, in this process, `attn_implementation="flash_attention_2"` and `"flash_attention_3"` are taken on a
    CPU as on CUDA, and run on `pagedattn_ext.flash_attn`, also where flash-attn itself is installed. transformers warns
    that flash-attn is for GPUs and 16 bits; this one is for CPUs and fp32 as well. A second call changes nothing.

    Where attention has no order and no window, as in encoders and from decoders to encoders, padding is left out of the
    keys alone. transformers leaves rows of the decoder out by the encoder's mask.

    Gradients are refused, with RuntimeError. GPT-Neo is refused as it is made, with ValueError: transformers leaves out
    the window of its local layers. Models that list kernels of the hub for their attention, such as gpt-oss, go on with
    these.
    """
    # Here, because they take half a second, which use_paged_attention does not need.
    from transformers.models.bark import modeling_bark
    from transformers.models.falcon import modeling_falcon
    from transformers.models.gpt_neo import modeling_gpt_neo

    for version in (2, 3):
        asked = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
        asked |= {"general_availability_check": _yes, "supported_devices": ((_yes, "cpu"), (_yes, "cuda"))}
        transformers.AttentionInterface.register(f"flash_attention_{version}", _flash_attention)
    modeling_flash_attention_utils._lazy_imports = _flash_attention_functions
    flash_attention.get_target_dtype = _target_dtype
    for modeling in (modeling_bark, modeling_falcon):  # which import these names only where they find flash-attn
        modeling._flash_attention_forward = modeling_flash_attention_utils._flash_attention_forward
        modeling.get_target_dtype = _target_dtype
    modeling_gpt_neo.GPTNeoPreTrainedModel._supports_flash_attn = False


def _yes() -> bool:
    return True


_lazy_imports = modeling_flash_attention_utils._lazy_imports
_get_target_dtype = flash_attention.get_target_dtype


def _target_dtype(query: Tensor, module: torch.nn.Module) -> torch.dtype | None:
    """What transformers casts a query in fp32 to: the dtype of the `nn.Linear` in the attention. GPT-2 has none there,
    and keeps fp32."""
    try:
        return _get_target_dtype(query, module)
    except StopIteration:
        return None


def _flash_attention_functions(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """What transformers calls for an attention: functions, and how to leave out padding and bring it back."""
    if implementation not in ("flash_attention_2", "flash_attention_3"):
        return _lazy_imports(implementation, *args, **kwargs)
    return (
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_varlen_func,
        flash_attn.flash_attn_with_kvcache,
        modeling_flash_attention_utils._pad_input,
        modeling_flash_attention_utils._unpad_input,
    )


def _flash_attention(
    module: torch.nn.Module,
    query: Tensor,  # [batch, num_heads, num_rows, head_size]
    key: Tensor,  # [batch, num_kv_heads, num_keys, head_size]
    value: Tensor,
    attention_mask: Tensor | None,  # [batch, num_keys], 0 where a key is padding
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    causal = module.is_causal if is_causal is None else is_causal
    if attention_mask is not None and not causal and sliding_window is None:
        real = attention_mask.bool()
        key, value = (each.transpose(1, 2)[:, : real.shape[1]][real].transpose(0, 1)[None] for each in (key, value))
        batch, num_rows = query.shape[0], query.shape[2]
        kwargs["cu_seq_lens_q"] = num_rows * torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        kwargs["cu_seq_lens_k"] = pad(real.sum(1).cumsum(0, dtype=torch.int32), (1, 0))
        kwargs |= {"max_length_q": num_rows, "max_length_k": real.shape[1]}
        attention_mask = None
    kwargs |= {"is_causal": is_causal, "sliding_window": sliding_window}
    return flash_attention.flash_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _check_model(model: object) -> None:
    def refuse(expected: str, got: object) -> None:
        raise ValueError(f"use_paged_attention: model: expected {expected}, got {got}")

    if not isinstance(model, transformers.PreTrainedModel):
        name = type(model).__name__
        raise TypeError(f"use_paged_attention: model: expected a transformers.PreTrainedModel, got {name}")
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        refuse("a decoder", f"{name}, an encoder-decoder")
    if not model.can_generate():
        refuse("a model that generates (...ForCausalLM)", name)
    others = {*(getattr(config, "layer_types", None) or ())} - {FULL_ATTENTION, "sliding_attention"}
    if model._is_stateful or others:
        refuse("attention in every layer", f"{name}" + (f" with {', '.join(sorted(others))}" if others else ""))
    flags = (model._supports_attention_backend, model._supports_flash_attn, model._can_set_attn_implementation())
    if not all(flags):
        refuse("attention without masks, through transformers' AttentionInterface", name)
    if differ := PLANNED_BY.intersection(getattr(config, "per_layer_attributes", None) or ()):
        refuse("layers that are alike", f"{name}, whose layers differ in {', '.join(sorted(differ))}")
    if _head_size(config) > MAX_HEAD_SIZE:
        refuse(f"a head size of at most {MAX_HEAD_SIZE}", _head_size(config))


def _head_size(config: Any) -> int:
    """The head size of the keys and values that the attention gets. If they differ (expanded MLA), the wider one."""
    key_size = getattr(config, "qk_head_dim", None) or find_head_dim(config)
    return max(key_size, getattr(config, "v_head_dim", None) or 0)


# ---- attention ------------------------------------------------------------------------------------------------------


class _Pages:
    """The pages of a PagedAttentionCache as caches of the ops, and what the layers of one step share."""

    def __init__(self, cache: PagedAttentionCache) -> None:
        allocator = cache.cache_allocators[FULL_ATTENTION]
        self.page_size: int = allocator.tokens_per_page
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in allocator.layer_indices:
            keys, values = allocator.get_cache_for_block_table(layer)  # [num_pages, page_size, num_kv_heads, head_size]
            num_pages, page_size, num_kv_heads, head_size = keys.shape
            x = 16 // keys.dtype.itemsize
            # Nobody else looks into a page, so its elements may lie in our order.
            self.caches[layer] = (
                keys.view(num_pages, num_kv_heads, head_size // x, page_size, x),
                values.view(num_pages, num_kv_heads, head_size, page_size),
            )
        self.attended: set[int] = set()  # the layers that have called the attention in this step
        self._step: Tensor | None = None
        self._inputs: tuple[Tensor, Tensor, Tensor]

    def inputs(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """slot_mapping, block_tables and seq_lens of the step that these arguments of the attention belong to."""
        if self._step is not arguments["cu_seq_lens_q"]:  # one tensor for the layers of a step, a new one for each step
            self._step = arguments["cu_seq_lens_q"]
            self._inputs = self._make_inputs(arguments)
        return self._inputs

    def _make_inputs(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        ends = arguments["cu_seq_lens_k"][FULL_ATTENTION]
        seq_lens = ends.diff()
        if arguments["block_table"] is not None:  # one new token a sequence
            block_tables = arguments["block_table"][0]
            last = seq_lens - 1
            pages = block_tables.gather(1, (last // self.page_size).long()[:, None])[:, 0]
            return pages.long() * self.page_size + last % self.page_size, block_tables, seq_lens
        slot_mapping = arguments["write_index"][0]
        slots = arguments["read_index"][0]
        if not slots.numel():  # no sequence has tokens from earlier steps
            slots = slot_mapping
        starts = torch.arange(0, arguments["max_length_k"][FULL_ATTENTION], self.page_size, device=ends.device)
        first = (ends[:-1, None] + starts).clamp(max=slots.numel() - 1)  # of each page: its place in `slots`
        return slot_mapping, (slots[first] // self.page_size).int(), seq_lens


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_size]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    value: Tensor,  # [1, num_kv_heads, num_tokens, head_size], or narrower
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pagedattn_pages: _Pages | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in place of its own; returns [1, num_tokens, num_heads, head_size]."""
    pages = pagedattn_pages
    if pages is None:
        raise RuntimeError(
            f"{NAME}: called without the paged cache: either the model is used while a continuous batching manager of "
            "it runs, or its layers do not pass the cache on to their attention"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if layer in pages.attended:  # its keys and values would take the place of the first ones
        raise RuntimeError(f"{NAME}: expected one call from each layer in a step, got two from layer {layer}")
    pages.attended.add(layer)
    for name, given in (("attention_mask", attention_mask), ("position_bias", arguments.get("position_bias"))):
        if given is not None:
            raise ValueError(f"{NAME}: {name}: expected None, got a tensor at layer {layer}")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{NAME}: expected causal attention, got is_causal = False at layer {layer}")
    key_cache, value_cache = pages.caches[layer]
    num_kv_heads, head_size = value_cache.shape[1:3]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[1] != num_kv_heads or tensor.shape[3] > head_size:
            expected = f"{num_kv_heads} heads of at most {head_size} elements"
            raise ValueError(f"{NAME}: {name}: expected {expected}, got shape {list(tensor.shape)} at layer {layer}")

    slot_mapping, block_tables, seq_lens = pages.inputs(arguments)
    ops.reshape_and_cache(_rows(key, head_size), _rows(value, head_size), key_cache, value_cache, slot_mapping)
    out, _ = ops.paged_attention(
        _rows(query, head_size),
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc=arguments["cu_seq_lens_q"] if arguments["block_table"] is None else None,  # one row a sequence
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out[None, ..., : value.shape[-1]], None


def _rows(tensor: Tensor, head_size: int) -> Tensor:
    """[1, num_heads, num_tokens, n] -> [num_tokens, num_heads, head_size], zeros from n on: they change no product."""
    rows = tensor[0].transpose(0, 1)
    return pad(rows, (0, head_size - rows.shape[-1])) if rows.shape[-1] < head_size else rows.contiguous()


transformers.AttentionInterface.register(NAME, _paged_attention)  # a new name; no other attention changes


# ---- continuous batching --------------------------------------------------------------------------------------------


class _PagedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """The manager that a model gets from `use_paged_attention`.

    transformers plans the cache by the model's config. Block tables cannot say where transformers would keep the tokens
    of a layer with a sliding window. So transformers plans with a view of the model, whose config says that all layers
    are full attention with a head size that the ops take. The model that runs keeps its own config, and its layers
    bring their windows.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        generation_config: transformers.GenerationConfig,
        continuous_batching_config: transformers.ContinuousBatchingConfig,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        _check_config(continuous_batching_config)
        if model.dtype not in DTYPES:
            raise ValueError(f"use_paged_attention: expected float32, float16 or bfloat16, got {model.dtype}")
        config = copy.deepcopy(continuous_batching_config)
        config.use_cuda_graph = False
        resolve_using_hints(config, workload_hints)
        resolve_without_hints(config)
        max_blocks_per_request, config.max_blocks_per_request = config.max_blocks_per_request, 0
        self._view = _view(model)
        super().__init__(self._view, generation_config, config, workload_hints)
        self.model = model.eval()
        # Steps with nothing but decode rows shall come with block tables. transformers does this only for flash-attn.
        self.continuous_batching_config.max_blocks_per_request = max_blocks_per_request
        self._enough_blocks = None if config.num_blocks else _enough_blocks(config.page_size, workload_hints)

    def switch_to_cb_friendly_attn(self, model: transformers.PreTrainedModel, auto_switch_to_flash: bool) -> None:
        """Does nothing: `start` switches the attention."""

    def start(self) -> None:
        if not self.is_running():
            if self.model.config.get_text_config()._attn_implementation == NAME:
                raise RuntimeError("use_paged_attention: another continuous batching manager of this model runs")
            self._own_configs = _replace_configs(self.model)
            self.model.config.get_text_config()._attn_implementation = NAME
            self._hook = self.model.register_forward_pre_hook(_pass_pages, with_kwargs=True)
        super().start()

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:  # since 5.24 with the caller's inference mode
        try:
            super()._run_generation_loop(*args, **kwargs)
        finally:
            self._hook.remove()
            for module, config in self._own_configs:
                module.config = config

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        model, self.model = self.model, self._view
        try:
            processor = self._plan()
        finally:
            self.model = model
        if not hasattr(processor.cache, "pagedattn_pages"):
            processor.cache.pagedattn_pages = _Pages(processor.cache)
        return processor

    def _plan(self) -> ContinuousBatchProcessor:
        """The plan with a cache no larger than the requests fill, if the requests are known and no size was asked for.
        transformers would take most of the memory, and on the CPU fill it with zeros."""
        if self._enough_blocks and self.batch_processor is None:
            self.continuous_batching_config.num_blocks = self._enough_blocks
            try:
                return super()._create_batch_processor()
            except MemoryError:
                self.continuous_batching_config.num_blocks = None
        return super()._create_batch_processor()

    def _generation_step(self) -> None:
        pages: _Pages = self.batch_processor.cache.pagedattn_pages
        pages.attended.clear()
        super()._generation_step()
        if missed := pages.caches.keys() - pages.attended:  # the tokens are then wrong
            raise RuntimeError(f"{NAME}: expected a call from each layer, got none from layers {sorted(missed)}")


def _pass_pages(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The pages in place of the cache that has them. Layers hand on an argument that they do not know to their
    attention, but since 5.24 they know `cache`, and would write into it."""
    pages = getattr(kwargs.get("cache"), "pagedattn_pages", None)
    if pages is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "cache"} | {"pagedattn_pages": pages}
    return args, kwargs


def _replace_configs(model: transformers.PreTrainedModel) -> list[tuple[torch.nn.Module, Any]]:
    """Gives the modules of a model copies of its configs, which other models may share. Returns what they had."""
    copies: dict[int, Any] = {}  # of the config and of all that it holds, by the id of the original
    copy.deepcopy(model.config, copies)
    own = [(module, module.config) for module in model.modules() if id(vars(module).get("config")) in copies]
    for module, config in own:
        module.config = copies[id(config)]
    return own


def _view(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same modules and weights under another config. Only the planning of the cache looks at this config."""
    view = copy.copy(model)
    view.config = copy.deepcopy(model.config)
    config = view.config.get_text_config()
    config.head_dim = padded_head_size(_head_size(config), model.dtype)
    config.layer_types = [FULL_ATTENTION] * config.num_hidden_layers
    config._attn_implementation = NAME
    return view


def _enough_blocks(page_size: int, hints: WorkloadHints | None) -> int | None:
    """Blocks for all requests at once, and a quarter more. With few free blocks transformers admits them one by one."""
    if hints is None or not hints.max_generated_length:
        return None
    longest = hints.max_prompt_length + hints.max_generated_length
    return -(-hints.num_requests * -(-longest // page_size) * 5 // 4)


def _check_config(config: transformers.ContinuousBatchingConfig) -> None:
    if not 4 <= config.page_size <= MAX_BLOCK_SIZE or config.page_size & (config.page_size - 1):
        raise ValueError(
            f"use_paged_attention: page_size: expected a power of two from 4 to {MAX_BLOCK_SIZE}, "
            f"got {config.page_size}"
        )
    if any(config.cuda_graph_booleans):
        raise ValueError(f"use_paged_attention: use_cuda_graph: expected None or False, got {config.use_cuda_graph}")
    for name in ("varlen_compile_config", "decode_compile_config", "default_compile_level"):
        if getattr(config, name):
            expected = "nothing (torch.compile is not supported)"
            raise ValueError(f"use_paged_attention: {name}: expected {expected}, got {getattr(config, name)}")


def init_continuous_batching(
    model: transformers.PreTrainedModel,
    generation_config: transformers.GenerationConfig | None = None,
    continuous_batching_config: transformers.ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """A model's method of this name. All of transformers' ways to continuous batching go through it."""
    if (kept := getattr(model, "_cached_continuous_batching_manager", None)) is not None:
        return kept
    generation_config = copy.deepcopy(generation_config or model.generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # never stop; None would mean the id of model.config
    for config in (continuous_batching_config, getattr(generation_config, "continuous_batching_config", None)):
        if isinstance(config, transformers.ContinuousBatchingConfig):
            return _PagedManager(model, generation_config, config, workload_hints)
    return _PagedManager(model, generation_config, transformers.ContinuousBatchingConfig(), workload_hints)
