"""A model that several ranks share gives what the whole model gives. The ranks are threads here."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, Checkpoint, change_config, convert_to_bin, greedy_reference, make_model
from hypothesis import assume, given
from hypothesis import strategies as st
from quantized_checkpoints import (
    CONFIGS,
    SHAPES,
    linear_layers,
    matrix,
    save_quantized,
    set_matrix,
)
from reference import int4_rows, int8_rows
from safetensors.torch import load_file, save_file
from thread_ranks import Ranks, ThreadCommunicator, run_ranks
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.checkpoint_formats import Anew
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.loading.quantized_checkpoint import parse_format
from pagedattn_serve.loading.weights import checkpoint_shapes
from pagedattn_serve.models.cache_shape import allocate_caches
from pagedattn_serve.models.causal_lm import (
    AttentionMetadata,
    CausalLM,
    KVCache,
    SequenceRows,
    StepStates,
)
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, PackedLinear
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import Partition, Share, one_after_another, split
from pagedattn_serve.models.quantization import dequantized, quantize_int4, quantize_int8

NUM_TOKENS = 16
BLOCK_SIZE = 16


def can_split(name: str, world_size: int) -> bool:
    config = make_model(name).config
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", num_heads)
    return num_heads % world_size == 0 and (num_kv_heads % world_size == 0 or world_size % num_kv_heads == 0)


SPLITS = [(name, world_size) for name in VARIANTS for world_size in (2, 3, 4, 5, 7, 8) if can_split(name, world_size)]


def greedy(model: CausalLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> tuple[list[list[int]], Tensor]:
    """The tokens that follow each prompt, and the logits of the prompts' rows and of all decode steps.

    The prompts run together, then the sequences token by token.
    """
    blocks_per_seq = -(-(max(map(len, prompts)) + num_tokens) // BLOCK_SIZE)
    pairs = allocate_caches(model.cache_shapes, len(prompts) * blocks_per_seq, BLOCK_SIZE, model.dtype)
    kv_caches = [KVCache(*pair) for pair in pairs]
    states = [torch.empty(len(prompts), *state.shape, dtype=state.dtype) for state in model.states]
    tables = torch.arange(len(prompts) * blocks_per_seq, dtype=torch.int32).view(len(prompts), -1).flip(1).contiguous()
    outputs: list[list[int]] = [[] for _ in prompts]
    new, computed, logits = prompts, [0] * len(prompts), []
    for _ in range(num_tokens):
        counts = [len(tokens) for tokens in new]
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(computed, counts, strict=True)])
        seq = torch.arange(len(new)).repeat_interleave(torch.tensor(counts))
        starts = torch.tensor([0, *counts]).cumsum(0)
        of_states = [SequenceRows(int(starts[i]), n, i, not computed[i]) for i, n in enumerate(counts)]
        computed = [c + n for c, n in zip(computed, counts, strict=True)]
        metadata = AttentionMetadata(
            slot_mappings=[tables[seq, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE],
            block_tables=[tables],
            seq_lens=torch.tensor(computed, dtype=torch.int32),
            query_start_loc=None if max(counts) == 1 else starts.int(),
            sampling_rows=torch.arange(len(seq)),
            states=StepStates(states, of_states) if states else None,
        )
        token_ids = torch.tensor([token for tokens in new for token in tokens])
        rows = model(token_ids, positions, kv_caches, metadata)
        logits.append(rows)
        new = [[int(token)] for token in rows[starts[1:] - 1].argmax(-1)]
        for output, [token] in zip(outputs, new, strict=True):
            output.append(token)
    return outputs, torch.cat(logits)


def on_ranks(
    path: str | Path, world_size: int, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **options: Any
) -> list[tuple[list[list[int]], Tensor]]:
    """`greedy` of each rank."""

    def run(communicator: ThreadCommunicator) -> tuple[list[list[int]], Tensor]:
        model = load_model(path, partition=Partition(communicator.rank, world_size, communicator), **options)
        return greedy(model, prompts, num_tokens)

    return run_ranks(world_size, run)


def on_one(
    path: str | Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **options: Any
) -> tuple[list[list[int]], Tensor]:
    with torch.inference_mode():
        return greedy(load_model(path, **options), prompts, num_tokens)


# ---- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world_size"), SPLITS)
def test_tokens_are_those_of_transformers(
    get_checkpoint: Callable[[str], Checkpoint], name: str, world_size: int
) -> None:
    """On every rank, with the same bits on every rank, and logits that differ from the whole model's by rounding."""
    checkpoint = get_checkpoint(name)
    prompts, expected = checkpoint.prompts[:5], [tokens[:NUM_TOKENS] for tokens in checkpoint.expected[:5]]
    _, whole = on_one(checkpoint.path, prompts)
    ranks = on_ranks(checkpoint.path, world_size, prompts)
    for tokens, logits in ranks:
        assert tokens == expected
        assert torch.equal(logits, ranks[0][1])
    torch.testing.assert_close(ranks[0][1], whole, rtol=1e-4, atol=1e-4 * float(whole.std()))


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-full", "opt-350m", "bloom-8-heads"])
def test_bfloat16(get_checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """Every rank rounds its term of a sum. So logits may be further from those in fp32 than on one rank, a little."""
    checkpoint = get_checkpoint(name)
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(checkpoint.prompts, checkpoint.expected, strict=True)]
    exact = logits_of(on_one(checkpoint.path, sequences, num_tokens=1))
    one = logits_of(on_one(checkpoint.path, sequences, num_tokens=1, dtype="bfloat16")).float() - exact
    four = logits_of(on_ranks(checkpoint.path, 4, sequences, num_tokens=1, dtype="bfloat16")[3]).float() - exact
    assert 0 < four.norm() < 1.5 * one.norm()


def logits_of(result: tuple[list[list[int]], Tensor]) -> Tensor:
    return result[1]


def test_calls_of_a_step(get_checkpoint: Callable[[str], Checkpoint]) -> None:
    """Two sums a layer, one of the embedding, and the logits. Loading calls nothing, and one rank never does."""
    checkpoint = get_checkpoint("llama-gqa")

    def count(communicator: ThreadCommunicator) -> tuple[int, int]:
        partition = Partition(communicator.rank, communicator.world_size, communicator)
        model = load_model(checkpoint.path, partition=partition)
        of_loading = communicator.num_calls
        greedy(model, [[1, 2]], 3)
        return of_loading, communicator.num_calls

    assert run_ranks(2, count) == [(0, 3 * (2 * 2 + 2))] * 2
    assert run_ranks(1, count) == [(0, 0)]


def test_one_rank_has_the_layers_of_a_model_without_partition(get_checkpoint: Callable[[str], Checkpoint]) -> None:
    path = get_checkpoint("gpt2").path
    communicator = ThreadCommunicator(Ranks(1), 0, 1)
    alone, plain = load_model(path, partition=Partition(0, 1, communicator)), load_model(path)
    assert [(name, type(layer)) for name, layer in alone.named_modules()] == [
        (name, type(layer)) for name, layer in plain.named_modules()
    ]


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-llama3", "gpt2", "opt-350m", "bloom-8-heads"])  # all are tied
@pytest.mark.parametrize("form", ["bin", "old bin", "copied head", "other head"])
def test_forms_of_a_checkpoint(tmp_path: Path, name: str, form: str) -> None:
    """A head that is not the embedding, although the config ties the two, is the head; its copy is not noticed."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    if "head" in form:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = model.lm_head.weight.roll(3 if form == "other head" else 0, 0).detach().clone()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        convert_to_bin(tmp_path)
    if form == "old bin":
        file = tmp_path / "pytorch_model.bin"
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    _, expected = on_one(tmp_path, [[3, 1, 4]])
    for _, logits in on_ranks(tmp_path, 2, [[3, 1, 4]]):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("llama-gqa", "model.embed_tokens.weight", [97, 48]),
        ("llama-gqa", "model.layers.0.self_attn.k_proj.weight", [40, 48]),
        ("llama-gqa", "model.layers.1.mlp.down_proj.weight", [48, 72]),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", [48, 144]),
        ("gpt2", "transformer.h.0.mlp.c_proj.bias", [48]),  # which rank 1 does not keep
        ("bloom-8-heads", "transformer.h.1.self_attention.query_key_value.bias", [192]),
    ],
)
def test_errors_speak_of_the_whole_tensor(tmp_path: Path, name: str, tensor: str, shape: list[int], rank: int) -> None:
    make_model(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[tensor] = torch.zeros([size // 2 for size in shape])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    partition = Partition(rank, 2, ThreadCommunicator(Ranks(2), rank, 2))
    message = re.escape(f"{tensor}: expected {shape}, got {[size // 2 for size in shape]}")
    with pytest.raises(ValueError, match=f"do not fit .*: {message}$"):
        load_model(tmp_path, partition=partition)


# ---- quantized weights ----------------------------------------------------------------------------------------------


# Layers that are split by inputs.
SPLIT_BY_INPUTS = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "self_attention.dense", "dense_4h_to_h")


def inputs_of_ranks(layer_name: str, in_features: int, world_size: int) -> list[int]:
    """How many inputs of a layer each rank sees."""
    if not layer_name.endswith(SPLIT_BY_INPUTS):
        return [in_features]
    if in_features == 72:  # an MLP with two whole groups of 32 inputs
        assert world_size == 2
        return [32, 40]
    return [in_features // world_size] * world_size


def quantize_by_rank(
    model: PreTrainedModel, group_size: Callable[[str, int], int | None], weights: bool = True, head: bool = True
) -> None:
    """Let the linear layers see rows that are rounded as the ranks do it, each its own part. With `weights`, round
    the weights in the same way.

    group_size: of int4, by the name of a layer and the inputs of a rank; None: int8. head: whether the last layer is
    one of them.
    """
    world_size = 2
    for name, layer in linear_layers(model).items():
        if name == "lm_head" and not head:
            continue
        sizes = inputs_of_ranks(name, matrix(layer).shape[1], world_size)
        if weights:
            parts = matrix(layer).split(sizes, dim=1)
            rounded = [(quantize_int4 if group_size(name, part.shape[1]) else quantize_int8)(part) for part in parts]
            set_matrix(layer, torch.cat([dequantized(part) for part in rounded], dim=1))

        def round_rows(_: nn.Module, inputs: tuple[Tensor], name: str = name, sizes: list[int] = sizes) -> Tensor:
            parts = inputs[0].split(sizes, dim=-1)
            rounded = []
            for part in parts:
                size = group_size(name, part.shape[-1])
                rounded.append(int8_rows(part) if size is None else int4_rows(part, size))
            return torch.cat(rounded, dim=-1)

        layer.register_forward_pre_hook(round_rows)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen3", "gpt2", "opt-350m", "bloom-8-heads"])
def test_quantization(tmp_path: Path, name: str, quantization: str) -> None:
    """Tokens are those of plain torch where the weights and the rows of each rank are rounded by themselves.

    So a rank has int8 scales of its own in the layers that are split by inputs. The groups of int4 know no ranks.
    """
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = [[3], [(5 * i) % 97 for i in range(20)]]

    def group_size(layer_name: str, num_inputs: int) -> int | None:
        return 32 if quantization == "int4" and layer_name != "lm_head" and num_inputs % 32 == 0 else None

    quantize_by_rank(model, group_size)
    expected = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    for tokens, _ in on_ranks(tmp_path, 2, prompts, quantization=quantization):
        assert tokens == expected


@pytest.mark.parametrize("world_size", [2, 4])
def test_forms_of_layers_are_those_of_the_whole_model(tmp_path: Path, world_size: int) -> None:
    """Also where the slice of another layer is as large as the slice of the last layer, or as the vocabulary."""
    shape = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=4, intermediate_size=192)
    make_model("llama-mha", **shape, vocab_size=128 * world_size).save_pretrained(tmp_path)
    whole = load_model(tmp_path, quantization="int4")
    for rank in range(world_size):
        partition = Partition(rank, world_size, ThreadCommunicator(Ranks(world_size), rank, world_size))
        slices = load_model(tmp_path, quantization="int4", partition=partition)
        forms = {
            name.removesuffix(".linear"): type(layer)
            for name, layer in slices.named_modules()
            if isinstance(layer, PackedLinear | Int8Linear | Int4Linear)
        }
        assert forms == {name: type(whole.get_submodule(name)) for name in forms}
        assert Counter(forms.values()) == {Int4Linear: 2 * 4, Int8Linear: 1}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SHAPES)
def test_quantized_checkpoints(tmp_path: Path, name: str, config: str) -> None:
    """In groups, codes and rows are those of one rank. With a scale for each row, they are those of plain torch."""
    wide = dict(n_embd=128, n_head=2) if name == "gpt2" else dict(hidden_size=128)
    if name == "llama-gqa":
        wide = dict(hidden_size=128, head_dim=32)
    meant = save_quantized(tmp_path, name, CONFIGS[config], **wide)
    prompts = [[3], [(3 * i + 3) % 97 for i in range(8)]]
    stored = parse_format(CONFIGS[config])
    has_row_scales = config in ("int4-channel", "gptq-row")
    if stored.QUANTIZATION == "int8" or has_row_scales:
        size_of = (lambda _, num_inputs: num_inputs) if has_row_scales else (lambda *_: None)
        quantize_by_rank(meant, size_of, weights=isinstance(stored, Anew), head=False)
        expected = [greedy_reference(meant, prompt, NUM_TOKENS) for prompt in prompts]
        assert [tokens for tokens, _ in on_ranks(tmp_path, 2, prompts)] == [expected] * 2
        return
    tokens, logits = on_one(tmp_path, prompts)
    for tokens_of_rank, logits_of_rank in on_ranks(tmp_path, 2, prompts):
        assert tokens_of_rank == tokens
        # A sum in another order may move an element of a row over the edge between two of 255 steps.
        assert float((logits_of_rank - logits).norm() / logits.norm()) < 0.01


@pytest.mark.parametrize("config", ["int4-zeros", "gptq-v2", "awq"])
def test_slices_that_end_amid_a_packed_element(tmp_path: Path, config: str) -> None:
    """A key head of 20 outputs: the codes or zeros of eight of its outputs are in an element with those of others."""
    shape = dict(num_attention_heads=16, num_key_value_heads=2, head_dim=20)
    save_quantized(tmp_path, "llama-gqa", CONFIGS[config], **shape)
    prompts = [[3], [(5 * i) % 97 for i in range(20)]]
    tokens, logits = on_one(tmp_path, prompts)
    for tokens_of_rank, logits_of_rank in on_ranks(tmp_path, 2, prompts):
        assert tokens_of_rank == tokens
        assert float((logits_of_rank - logits).norm() / logits.norm()) < 0.01


# ---- what a rank holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world_size"), SPLITS)
def test_slices_cover_each_tensor(tmp_path: Path, name: str, world_size: int) -> None:
    """Once, or as often as there are ranks; key-value heads as often as there are ranks to a head."""
    model = make_model(name)
    model.config.save_pretrained(tmp_path)
    model.config.architectures = [type(model).__name__]
    change_config(tmp_path, architectures=model.config.architectures)
    counts = {key: torch.zeros(tensor.shape, dtype=torch.int) for key, tensor in model.state_dict().items()}
    for rank in range(world_size):
        slices = build_model(tmp_path, partition=Partition(rank, world_size))
        assert isinstance(slices, NativeCausalLM)
        for layer_name, layer in slices.named_modules():
            for kind, _ in layer.named_parameters(recurse=False):
                for key, shares in checkpoint_shapes(layer, layer_name, kind).items():
                    assert [share.whole for share in shares] == list(counts[key].shape)
                    index = [torch.cat([torch.arange(*bounds) for bounds in share.ranges]) for share in shares]
                    counts[key][torch.meshgrid(*index, indexing="ij")] += 1
    num_heads = model.config.num_attention_heads
    num_kv_heads = getattr(model.config, "num_key_value_heads", num_heads)
    for key, count in counts.items():
        is_replicated = any(part in key for part in ("norm", "ln_", "wpe", "embed_positions", "project_"))
        is_replicated |= key.endswith(tuple(f"{layer}.bias" for layer in SPLIT_BY_INPUTS))
        expected = world_size if is_replicated else 1
        if "k_proj" in key or "v_proj" in key:
            expected = max(1, world_size // num_kv_heads)
        assert count.unique().tolist() == [expected], key


@given(size=st.integers(1, 3000), num_parts=st.integers(1, 16), unit=st.sampled_from([1, 4, 32, 128]))
def test_splits(size: int, num_parts: int, unit: int) -> None:
    assume(size // unit >= num_parts)
    parts = [split(size, part, num_parts, unit) for part in range(num_parts)]
    bounds = [bound for part in parts for bound in part.ranges]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])] and bounds[-1][1] == size
    assert all(part.splits_only_at(unit) for part in parts)
    sizes = [part.size for part in parts]
    assert min(sizes) > 0 and max(sizes) - min(sizes) < 2 * unit


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=3))
def test_shares(sizes: list[tuple[int, int, int]]) -> None:
    """Of axes one after the other, whose elements become several or are packed: what the ranges say, `of` takes."""
    shares = [Share(before + own + after, ((before, before + own),)) for before, own, after in sizes]
    share = one_after_another(*shares)
    axis = torch.arange(share.whole)
    axes = axis.split([share.whole for share in shares])
    wanted = torch.cat([share.of(axis, 0) for share, axis in zip(shares, axes, strict=True)])
    assert torch.equal(share.of(axis, 0), wanted) and share.size == len(wanted)
    assert share.is_whole == (len(wanted) == len(axis))
    repeated = axis.repeat_interleave(3)
    assert torch.equal(share.times(3).of(repeated, 0), wanted.repeat_interleave(3))
    assert torch.equal(share.times(3).packed(3).of(axis, 0), wanted)


def test_key_value_heads_of_a_rank_are_those_of_its_query_heads() -> None:
    for num_kv_heads, queries_per_head, world_size in itertools.product((1, 2, 3, 4, 6), (1, 2, 4), (1, 2, 3, 4, 6, 8)):
        num_heads = num_kv_heads * queries_per_head
        for rank in range(world_size):
            partition = Partition(rank, world_size)
            try:
                heads, kv_heads = partition.heads(num_heads), partition.kv_heads(num_kv_heads)
            except ArgumentError:
                continue
            of_all = torch.arange(num_kv_heads)
            read = heads.of(of_all.repeat_interleave(queries_per_head), 0)
            own = kv_heads.of(of_all, 0)
            assert torch.equal(read, own.repeat_interleave(heads.size // kv_heads.size))


# Prints the largest memory that loading takes beside the memory before: memory of its own, and mapped from files.
LOAD = """
import sys, threading, time
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models.partition import Partition
from thread_ranks import Ranks, ThreadCommunicator

def resident(*kinds):
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(kinds))

def look():
    seen.append((resident("RssAnon", "RssShmem"), resident("RssFile")))

def watch():
    while not done.wait(0.0005):
        look()

partition = Partition(1, 2, ThreadCommunicator(Ranks(2), 1, 2))
build_model(sys.argv[1], partition=partition)
seen, done = [], threading.Event()
look()
watcher = threading.Thread(target=watch, daemon=True)  # or a load that fails would not end
watcher.start()
model = load_model(sys.argv[1], partition=partition)
look()
done.set()
watcher.join()
print(*(max(kind) - kind[0] for kind in zip(*seen)))
"""


def test_a_rank_holds_its_share_alone(tmp_path: Path) -> None:
    """Half of the weights and a tenth, while they are loaded and afterwards; of the file, what is read at the time."""
    config = LlamaConfig(
        **dict(vocab_size=4000, hidden_size=768, intermediate_size=2048, num_hidden_layers=10, dtype="bfloat16"),
        **dict(num_attention_heads=12, num_key_value_heads=4, architectures=["LlamaForCausalLM"]),
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = sum(tensor.nbytes for tensor in tensors.values())
    assert weights > 100 << 20
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    own, mapped = map(int, result.stdout.split())
    assert weights / 4 < own < weights / 2 * 1.1
    assert mapped < weights / 4


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size", "overrides", "message"),
    [
        ("llama-gqa", 3, {}, "a divisor of the 4 query heads of the model, got 3"),
        ("gpt2", 8, {}, "a divisor of the 4 query heads of the model, got 8"),
        ("qwen2-sliding", 2, {}, "a divisor or a multiple of the 3 key-value heads of the model, .*, got 2"),
        ("opt-125m", 3, dict(ffn_dim=2), "at most 2, the groups of the 2 features of an MLP, got 3"),
        ("llama-gqa", 4, dict(vocab_size=3), "at most 3, the size of the vocabulary, got 4"),
    ],
)
def test_models_that_ranks_cannot_share(
    tmp_path: Path, name: str, world_size: int, overrides: dict[str, Any], message: str
) -> None:
    make_model(name, **overrides).save_pretrained(tmp_path)
    for rank in range(world_size):
        with pytest.raises(ArgumentError, match=f"^tensor_parallel_size: expected {message}$"):
            build_model(tmp_path, partition=Partition(rank, world_size))


def test_an_mlp_with_as_many_groups_as_ranks() -> None:
    """A rank more would have none."""
    assert Partition(3, 4, group_size=32).features(128).size == 32
    message = "at most 4, the groups of the 128 features of an MLP, got 5"
    with pytest.raises(ArgumentError, match=f"^tensor_parallel_size: expected {message}$"):
        Partition(0, 5, group_size=32).features(128)


@pytest.mark.parametrize(
    ("name", "config", "world_size", "message"),
    [
        ("llama-gqa", "awq-64", 2, "one that leaves each rank whole groups of 64, .*, of the 64 elements of 4 heads"),
        ("gpt2", "gptq-row", 4, "one that leaves each rank whole groups of 32, .*, of the 64 elements of 4 heads"),
        ("bloom-8-heads", "int4", 4, "one that leaves each rank whole groups of 32, .*, of the 64 elements of 8 heads"),
    ],
)
def test_groups_that_ranks_cannot_share(tmp_path: Path, name: str, config: str, world_size: int, message: str) -> None:
    save_quantized(tmp_path, name, CONFIGS[config])
    with pytest.raises(ArgumentError, match=f"^tensor_parallel_size: expected {message}, got {world_size}$"):
        build_model(tmp_path, partition=Partition(0, world_size))
