"""Any other causal LM: transformers' own forward on one flat row of tokens, with attention on the paged cache.

transformers lets a library register an attention function under a name. If a model is given the name, its layers call
the function. So the model is transformers' own, and nothing but the cache lives from step to step.

A model that would give wrong results is refused, most often when it is built (`transformers_trial`), at the latest when
it is loaded: a few tokens go through our attention and through transformers', and the logits must agree.
"""

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.models.cache_shape import CacheShape, allocate_caches, widest
from pagedattn_serve.models.causal_lm import (
    AttentionMetadata,
    CausalLM,
    KVCache,
    ModelOutput,
    SequenceRows,
    StepStates,
    misfit,
)
from pagedattn_serve.models.latent_attention import absorb, attend_to_latents, keep_latents
from pagedattn_serve.models.layers import attention
from pagedattn_serve.models.partition import SINGLE, Partition
from pagedattn_serve.models.transformers_positions import NumTokensBefore, cache_argument, position_arguments
from pagedattn_serve.models.transformers_slices import Join, Joins, Slices, joined, name_of
from pagedattn_serve.models.transformers_states import (
    ContiguousRows,
    StateStep,
    WithDtype,
    keep_linear_layers,
    mixers,
    replace_mixers,
)
from pagedattn_serve.models.transformers_trial import (
    NO_POSITIONS,
    TRIAL,
    AttentionShape,
    Refusal,
    Trial,
    TrialMask,
    give_to_layers,
    run_trial,
    without_advice,
)
from pagedattn_serve.progress import Report, reported

PAGED = "pagedattn"  # `paged_attention` in transformers' register; it has no mask function, so no masks are made
FIRST_VERSION = (5, 19)  # of the versions that the tests were run with
# The relative difference of logits that rounding explains; models that mix up their tokens had more than half.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
WITHOUT_POSITIONS = 1 << 16  # tokens of a sequence for a model that knows no positions, as it keeps states alone


class Step:
    """What the layers find beside their own arguments while the model is called: the caches, where to look in them, and
    what the trial has seen of each layer.

    shapes: of the attention of each layer that attends. cache_of_layer: as in `CausalLM`.
    states: for the layers that keep a state (`MixerForward`).
    """

    inputs: tuple[Sequence[KVCache], AttentionMetadata, Tensor] | None = None  # the last one: positions
    states: StateStep | None = None
    is_trial = False

    def __init__(self, shapes: dict[int, AttentionShape], cache_of_layer: list[int | None]) -> None:
        self.shapes = shapes
        self.cache_of_layer = cache_of_layer

    @property
    def is_alone(self) -> bool:
        """Whether transformers calls the layers, and not a step of the engine."""
        return self.states is None


def cache_shape(writer: int, shapes: dict[int, AttentionShape]) -> CacheShape:
    """Of the cache that a layer writes. It keeps what the widest window shows of the layers that attend to it."""
    window = widest(shape.window for shape in shapes.values() if shape.writer == writer)
    shape = shapes[writer]
    return CacheShape(shape.num_kv_heads, shape.head_size, has_values=not shape.is_latent, window=window)


def tell_positions(model: PreTrainedModel, step: Step) -> None:
    """For layers that scale queries by their positions, which are Llama 4's layers without rotary embedding."""

    def add_cache(
        name: str | None, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert name is not None
        return args, kwargs if step.inputs is None else {**kwargs, name: NumTokensBefore(step.inputs[2])}

    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.register_forward_pre_hook(partial(add_cache, cache_argument(module.forward)), with_kwargs=True)


class TransformersCausalLM(CausalLM):
    """Built without weights, then loaded. Both steps raise ValueError for a model that would give wrong results.

    slices: what a rank holds of a model that several ranks share; None for one rank.
    """

    def __init__(self, config: Any, dtype: torch.dtype, partition: Partition = SINGLE) -> None:
        super().__init__()
        self.runs = f"through transformers {transformers.__version__}"
        self.architecture = (config.architectures or ["none"])[0]
        self.dtype = dtype
        try:
            self.config = config_of_causal_lm(config)
            text_config = self.config.get_text_config()
            self.model = build(config, dtype)
            self.max_model_len = max_model_len(text_config)
            with last_hidden_states(self.model) as hidden:
                trial = run_trial(self.model, text_config)
            self.head = f"model.{name_of(self.model, self.model.get_output_embeddings())}"
            self.embedding_size = hidden[0].shape[-1]
        except Exception as error:  # also what a model runs into that expects a mask, or numbers
            raise self.refusal(error) from None
        self.partition = partition
        states = trial.mixer_cache.shapes()
        self.state_keys, self.states = list(states), list(states.values())
        self.linear_use = trial.linear_use
        keep_linear_layers(self.model, self.linear_use.read)
        self.slices = None if partition.world_size == 1 else self.slice(trial)
        shapes = trial.shapes if self.slices is None else self.slices.attention
        absorb(self.model)
        self.num_layers = text_config.num_hidden_layers
        self.num_heads = max((shape.num_heads for shape in shapes.values()), default=0)
        writers = sorted({shape.writer for shape in shapes.values()})
        self.cache_shapes = [cache_shape(writer, shapes) for writer in writers]
        cache_of = {layer: writers.index(shape.writer) for layer, shape in shapes.items()}
        self.cache_of_layer = [cache_of.get(layer) for layer in range(self.num_layers)]
        self.vocab_size = text_config.vocab_size
        self.step = Step(shapes, self.cache_of_layer)

    def load_weights(
        self, tensors: dict[str, Tensor], directory: Path, device: str, on_loading: Report | None = None
    ) -> None:
        """Replace the model without weights by the checkpoint's, or by the rank's slices of it, on `device`.

        tensors: of the checkpoint, by name. directory: where they lie, for errors.
        on_loading: as `load_model` takes it.
        """
        if self.slices is None:
            self.model = load(type(self.model), tensors, directory, self.config, self.dtype, on_loading)
            self.model = self.model.to(device).eval()
        else:
            with self.slices.cut_when_loaded(type(self.model)) as model_class:
                self.model = load(model_class, tensors, directory, self.config, self.dtype, on_loading)
                self.model = self.model.to(device).eval()
            self.slices.make_slices(self.model)
        keep_latents(self.model, (TRIAL, PAGED))
        absorb(self.model)
        replace_mixers(self.model)
        keep_linear_layers(self.model, self.linear_use.read)
        give_to_layers(self.model, self.step)
        tell_positions(self.model, self.step)
        self.position_arguments = position_arguments(self.model)
        try:
            with joined(self.model, {} if self.slices is None else self.slices.joins_alone()), without_advice():
                difference = self.compare()
        except ArgumentError:
            raise
        except Exception as error:  # whatever a model runs into that expects more than its tokens and positions
            raise self.refusal(error) from None
        if not difference < TOLERANCES[self.dtype]:
            reason = f"its logits are not those that it has with its own attention, they differ by {difference:.1%}"
            raise self.refusal(Refusal(reason))
        self.forgets_states = any(mixer.forgets for mixer in mixers(self.model))

    def slice(self, trial: Trial) -> Slices:
        """The rank's slices, which the model without weights is made of.

        trial: of the whole model. Raises ArgumentError if ranks cannot share the model.
        """
        try:
            slices = Slices(self.model, trial.shapes, self.partition)
            slices.cut_all(self.model)
            slices.make_slices(self.model)
            with joined(self.model, slices.joins_alone()):
                if run_trial(self.model, self.config.get_text_config()).shapes != slices.attention:
                    raise Refusal("its slices attend with other heads than those of a rank")
        except ArgumentError:
            raise
        except Exception as error:  # also what layers run into that count on whole parameters
            raise ArgumentError(
                "tensor_parallel_size",
                f"1, as {self.architecture} runs {self.runs}, and ranks cannot share it: {reason_of(error)}",
                self.partition.world_size,
            ) from None
        return slices

    def joins(self) -> Joins:
        """As `NativeCausalLM.joins`."""
        joins: Joins = {}
        if self.slices is not None:
            assert self.partition.communicator is not None
            joins = self.slices.joins(self.partition.communicator)
        for name in self.linear_use.scattered:
            joins[name] = within(ContiguousRows, joins.get(name))
        for name in self.linear_use.typed:
            joins[name] = within(partial(WithDtype, dtype=self.dtype), joins.get(name))
        return {f"model.{name}": join for name, join in joins.items()}

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        self.step.inputs = kv_caches, metadata, positions
        if metadata.states is not None:
            self.step.states = StateStep(self.state_keys, metadata.states)
        inputs = self.position_arguments(positions) if self.cache_shapes else {}
        try:
            outputs = self.model(
                input_ids=token_ids[None], use_cache=False, logits_to_keep=metadata.sampling_rows, **inputs
            )
        finally:
            self.step.inputs = self.step.states = None  # or caches would stay in memory when their owner lets go
        logits: Tensor = outputs.logits[0]
        return logits

    def with_hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        num_pooled: int,
    ) -> ModelOutput:
        of_logits, of_pooled = metadata.sampling_rows.tensor_split([len(metadata.sampling_rows) - num_pooled])
        with last_hidden_states(self.model) as hidden:
            logits = self(token_ids, positions, kv_caches, replace(metadata, sampling_rows=of_logits))
        return ModelOutput(logits, hidden[0][0, of_pooled])

    @torch.inference_mode()
    def compare(self) -> float:
        """Relative difference of logits: two sequences that run together, in pieces, against each sequence alone.

        A quarter of the rows may differ by more, because rounding decides between two experts that are equally likely.
        A rank that has slices computes with them alone, without the other ranks. Raises ArgumentError if the logits of
        a sequence alone are no numbers.
        """
        block_size, device = 8, self.model.device
        pairs = allocate_caches(self.cache_shapes, 4, block_size, self.dtype, device)
        kv_caches = [KVCache(*pair) for pair in pairs]
        states = [torch.empty(2, *state.shape, dtype=state.dtype, device=device) for state in self.states]
        begin, end = (0, self.vocab_size) if self.slices is None else self.slices.vocabulary.ranges[0]
        sequences = [begin + (torch.arange(n, device=device) * 7 + n) % min(end - begin, 1000) for n in (11, 6)]
        expected = self.alone(sequences)
        if not all(logits.isfinite().all() for logits in expected):
            got = f"NaN or infinity (broken weights, or an overflow in {self.dtype})"
            raise ArgumentError("model", "one whose logits are finite", got)
        differences = []
        computed = [0, 0]
        for counts in ([4, 5], [7, 1]):
            rows = [SequenceRows(i * counts[0], counts[i], 1 - i, not computed[i]) for i in (0, 1)]
            pieces = [torch.arange(c, c + n, device=device) for c, n in zip(computed, counts, strict=True)]
            computed = [c + n for c, n in zip(computed, counts, strict=True)]
            metadata = AttentionMetadata(
                slot_mappings=[torch.cat([pieces[0] + 2 * block_size, pieces[1]])],
                block_tables=[torch.tensor([[2, 3], [0, 1]], dtype=torch.int32, device=device)],
                seq_lens=torch.tensor(computed, dtype=torch.int32, device=device),
                query_start_loc=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device),
                sampling_rows=torch.arange(sum(counts), device=device),
                states=StepStates(states, rows) if states else None,
            )
            token_ids = torch.cat([tokens[piece] for tokens, piece in zip(sequences, pieces, strict=True)])
            actual = self(token_ids, torch.cat(pieces), kv_caches, metadata).float()
            wanted = torch.cat([logits[piece] for logits, piece in zip(expected, pieces, strict=True)])
            differences.append((actual - wanted).norm(dim=1) / wanted.norm(dim=1))
        return float(torch.cat(differences).quantile(0.75))

    def alone(self, sequences: list[Tensor]) -> list[Tensor]:
        """The logits of each sequence with transformers' own attention and cache, fp32 [num_tokens, vocab_size]."""
        self.model.set_attn_implementation("eager")
        logits = [self.model(input_ids=token_ids[None], use_cache=True).logits[0].float() for token_ids in sequences]
        self.model.set_attn_implementation(PAGED)
        return logits

    def refusal(self, error: Exception) -> ValueError:
        return ValueError(
            f"architecture: expected one that can run {self.runs}, got {self.architecture}: {reason_of(error)}"
        )


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list of one tensor once the model has run: what `AutoModel` gives as `last_hidden_state`, [1, num_tokens,
    embedding_size]. Between it and the layer of the logits, some models have other layers, or scale it."""
    found: list[Tensor] = []

    def take(part: nn.Module, inputs: object, output: Any) -> None:
        if (hidden := getattr(output, "last_hidden_state", None)) is not None:
            found[:] = [hidden]  # the outermost part ends last

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model]
    hooks = [part.register_forward_hook(take) for part in parts]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def within(outer: Join, inner: Join | None) -> Join:
    return outer if inner is None else lambda linear: outer(inner(linear))


def reason_of(error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    if TRIAL in reason or TrialMask.__name__ in reason:
        return "its layers do not leave their masks to transformers' attention interface"
    if isinstance(error, RuntimeError) and "meta" in reason.lower():
        return "its forward looks at numbers, and a trial run without weights has none"
    return reason if isinstance(error, Refusal) else f"a trial run fails with {type(error).__name__}: {reason}"


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # nothing else, as the trial has seen
) -> tuple[Tensor, None]:
    """An attention function for transformers. query, key, value: [1, heads, num_tokens, head_size].

    s_aux: sinks, [num_heads]. Returns [1, num_tokens, num_heads, head_size of value].
    """
    step: Step = module.pagedattn
    assert step.inputs is not None
    kv_caches, metadata = step.inputs[:2]
    layer_idx = module.layer_idx
    shape, cache = step.shapes[layer_idx], step.cache_of_layer[layer_idx]
    assert cache is not None
    if shape.is_latent:
        assert scaling is not None
        return attend_to_latents(module, query[0], key[0, 0], kv_caches[cache], metadata, scaling)[None], None
    query, key, value = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
    rows = attention(
        query,
        key,
        value,
        kv_caches[cache],
        metadata,
        query.shape[2] ** -0.5 if scaling is None else scaling,
        is_written=shape.writer != layer_idx,
        sliding_window=sliding_window,
        attention_chunk=shape.attention_chunk,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return rows.view(1, *query.shape[:2], -1), None


AttentionInterface.register(PAGED, paged_attention)


def config_of_causal_lm(config: Any) -> Any:
    """The config, or its text part: of some models that take images as well, such as Qwen 3.5 and Llama 4, transformers
    has the language model alone. Raises Refusal if the checkpoint is of neither."""
    if tuple(int(number) for number in transformers.__version__.split(".")[:2]) < FIRST_VERSION:
        raise Refusal(f"that takes transformers {FIRST_VERSION[0]}.{FIRST_VERSION[1]}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    # A published checkpoint may name the class of its own code. For EXAONE, transformers has LLaMA's class.
    own = type(config).__name__.removesuffix("Config") + "ForCausalLM"
    names = [own, *(each.__name__ for each in (model_class, with_images) if each is not None)]
    if model_class is None or config.architectures not in ([name] for name in names):
        raise Refusal(f"it is not the causal language model of model_type {config.model_type!r}")
    if isinstance(config, model_class.config_class):
        return config
    text_config = config.get_text_config()
    text_config.tie_word_embeddings = getattr(config, "tie_word_embeddings", text_config.tie_word_embeddings)
    return text_config


def build(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights, of the config or of its text part, ready for a trial. Raises Refusal if no such model
    takes a flat row of tokens."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    arguments = inspect.signature(model_class.forward).parameters
    if "logits_to_keep" not in arguments:
        raise Refusal("its forward does not take logits_to_keep")
    # All other implementations of experts look at numbers, and a model without weights has none.
    how = {"attn_implementation": TRIAL, "experts_implementation": "batched_mm", "trust_remote_code": False}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **how)
    keep_latents(model, (TRIAL, PAGED))
    replace_mixers(model)
    if not mixers(model):
        if model_class._is_stateful:
            raise Refusal("it keeps another state between tokens than keys and values")
        if "position_ids" not in arguments and cache_argument(model_class.forward) is None:
            raise Refusal(NO_POSITIONS)
    return model.eval()


def load(
    model_class: type[PreTrainedModel],
    tensors: dict[str, Tensor],
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    on_loading: Report | None,
) -> PreTrainedModel:
    """The model with its weights, made by transformers, which logs the tensors that the model does not use."""
    try:
        with own_progress(on_loading):
            model, report = model_class.from_pretrained(
                None,
                state_dict=tensors,
                config=config,
                dtype=dtype,
                attn_implementation=PAGED,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # which are in the report
                output_loading_info=True,
            )
    except (RuntimeError, ValueError) as error:
        reason = re.split(r"\. |\n", str(error).strip())[0]
        raise ValueError(f"model: cannot read the weights in {directory}: {reason}") from None
    problems = [f"missing {name}" for name in sorted(report["missing_keys"])]
    for name, found, expected in sorted(report["mismatched_keys"]):
        problems.append(f"{name}: expected {list(expected)}, got {list(found)}")
    if problems:
        raise ValueError(misfit(directory, model_class.__name__, problems))
    return model


@contextmanager
def own_progress(on_loading: Report | None) -> Iterator[None]:
    """Our progress in place of transformers' bars, which are tqdm's: an interrupt amid one would leave tqdm's lock
    taken, and all bars of other threads would wait for ever.

    on_loading: as `load_model` takes it. Bars of other threads stay as they are.
    """
    loading_thread: int | None = threading.get_ident()

    def make_bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != loading_thread:
            return factory(*args, **kwargs) if previous is None else previous(factory, args, kwargs)
        return transformers_logging.EmptyTqdm(*(reported(items, "Loading weights", on_loading) for items in args[:1]))

    previous = transformers_logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        loading_thread = None  # if another thread's hook leads here later on, it leads on
        transformers_logging.set_tqdm_hook(previous)


def max_model_len(config: Any) -> int:
    """Positions up to which the embedding of a token depends on its position alone, not on its batch.

    If one sequence is longer than the original length, "longrope" turns all tokens of the batch in another way.
    "dynamic" turns them in another way for each length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    length: int = getattr(config, "max_position_embeddings", None) or WITHOUT_POSITIONS
    for parameters in (rope, *rope.values()):  # the same for all layers, or a dict for each type of layer
        match parameters.get("rope_type") if isinstance(parameters, dict) else None:
            case "dynamic":
                raise Refusal(
                    "its rotary embedding is of type dynamic, which depends on the longest sequence of a batch"
                )
            case "longrope":
                length = min(length, parameters["original_max_position_embeddings"])
    return length
