"""Models that run through transformers, shared by ranks as their plans say. The ranks are threads here."""

import gc
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_partition import greedy, on_one
from test_transformers_models import make_config, make_model, prompts_of, references
from test_transformers_states import FAMILIES
from thread_ranks import Ranks, ThreadCommunicator, run_ranks
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Olmo2Config

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models import transformers_model
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.linear import Int4Linear, Int8Linear
from pagedattn_serve.models.partition import Partition
from pagedattn_serve.models.transformers_model import TransformersCausalLM

LOADING = threading.Lock()  # transformers changes torch's defaults while it makes a model, for all threads


def load_slices(path: Path, communicator: ThreadCommunicator, **options: Any) -> CausalLM:
    partition = Partition(communicator.rank, communicator.world_size, communicator)
    with LOADING:
        model = load_model(path, partition=partition, **options)
    assert communicator.num_calls == 0  # a rank loads alone
    return model


def build_slices(path: Path, rank: int, world_size: int) -> TransformersCausalLM:
    model = build_model(path, partition=Partition(rank, world_size))
    assert isinstance(model, TransformersCausalLM)
    return model


# By type of model and number of ranks: what differs from SHAPE, and the heads of a rank, query and key-value. Each has
# a word, or a layer, that those before it do not have.
SPLITS: dict[tuple[str, int], tuple[dict[str, Any], tuple[int, int]]] = {
    ("smollm3", 2): (dict(vocab_size=97), (2, 1)),  # as LLaMA; ranks with shares of different sizes
    ("gemma3_text", 4): (dict(tie_word_embeddings=True), (1, 1)),  # copies of heads, a scaled embedding
    ("gpt_neox", 2): ({}, (2, 2)),  # fused by heads, with biases
    ("phi3", 2): ({}, (4, 2)),  # fused layers whose outputs are gathered
    ("deepseek_v2", 2): ({}, (2, 1)),  # whole latents, and heads made of them; sliced experts beside shared ones
    ("qwen3_moe", 4): ({}, (1, 1)),
    ("gemma4_text", 2): ({}, (2, 1)),  # heads by layer, one of them a copy on each rank; layers that share a cache
    ("gpt_oss", 4): (dict(num_local_experts=7), (1, 1)),  # sinks, and whole experts: one rank has one of them
    **{
        (model_type, 2): (FAMILIES[model_type][0], (2, 1))  # whole mixers, and heads as those before have them
        for model_type in ("falcon_h1", "granitemoehybrid", "jamba", "lfm2", "nemotron_h", "qwen3_next")
    },
    ("mamba2", 2): (FAMILIES["mamba2"][0], (0, 0)),  # mixers alone
}


@pytest.mark.parametrize(("model_type", "world_size"), SPLITS)
def test_tokens_are_those_of_transformers(tmp_path: Path, model_type: str, world_size: int) -> None:
    fields, heads = SPLITS[model_type, world_size]
    model = make_model(model_type, **fields)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model_type, (1, 7, 33))
    expected = references(model, prompts, 12)

    def run(communicator: ThreadCommunicator) -> tuple[list[list[int]], Tensor]:
        slices = load_slices(tmp_path, communicator)
        assert (slices.num_heads, max((shape.num_kv_heads for shape in slices.cache_shapes), default=0)) == heads
        return greedy(slices, prompts, 12)

    _, whole = on_one(tmp_path, prompts, 12)
    ranks = run_ranks(world_size, run)
    for tokens, logits in ranks:
        assert tokens == expected
        assert torch.equal(logits, ranks[0][1])
    torch.testing.assert_close(ranks[0][1], whole, rtol=1e-4, atol=1e-4 * float(whole.std()))


@pytest.mark.parametrize(
    ("model_type", "world_size"), [("phi3", 2), ("qwen3_moe", 4), ("gpt_oss", 4), ("granitemoehybrid", 2)]
)
def test_slices_cover_each_parameter(tmp_path: Path, model_type: str, world_size: int) -> None:
    """Once, if they are split; and all but norms, routers, and what mixers have beside linear layers."""
    fields, _ = FAMILIES.get(model_type, ({}, 0))
    model = make_model(model_type, **fields)
    model.save_pretrained(tmp_path)
    expected = dict(model.named_parameters())
    slices = [build_slices(tmp_path, rank, world_size).slices for rank in range(world_size)]
    counts = {name: torch.zeros(parameter.shape, dtype=torch.int) for name, parameter in expected.items()}
    for of_rank in slices:
        assert of_rank is not None
        for name, (axis, share) in of_rank.cuts.items():
            assert share.whole == expected[name].shape[axis]
            for begin, end in share.ranges:
                counts[name].narrow(axis, begin, end - begin).add_(1)
    num_kv_heads = model.config.num_key_value_heads
    for name, count in counts.items():
        is_whole = any(part in name for part in ("norm", "router", "mlp.gate.")) or name.endswith("o_proj.bias")
        is_whole |= ".mamba." in name and "_proj." not in name
        is_copied = "k_proj" in name or "v_proj" in name
        copies = 0 if is_whole else max(1, world_size // num_kv_heads) if is_copied else 1
        assert count.unique().tolist() == [copies], name


def test_forms_of_layers_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Also where a rank's slice of the last layer is as large as another layer."""
    model = make_model("smollm3", hidden_size=128, intermediate_size=192, num_key_value_heads=4, vocab_size=256)
    model.save_pretrained(tmp_path)

    def run(communicator: ThreadCommunicator) -> tuple[Counter[type], Tensor]:
        slices = load_slices(tmp_path, communicator, quantization="int4")
        return Counter(map(type, slices.modules())), greedy(slices, [[3, 1, 4]], 1)[1]

    _, whole = on_one(tmp_path, [[3, 1, 4]], 1, quantization="int4")
    for types, logits in run_ranks(2, run):
        assert types[Int4Linear] == 2 * 7 and types[Int8Linear] == 1
        assert float((logits - whole).norm() / whole.norm()) < 0.02


def test_ranks_share_whole_groups_of_a_width(tmp_path: Path) -> None:
    """A row's bits depend on the rows beside it where a rank has a rest of a group of 32."""
    make_model("smollm3", intermediate_size=96).save_pretrained(tmp_path)
    for rank, size in ((0, 32), (1, 64)):
        slices = build_slices(tmp_path, rank, 2).slices
        assert slices is not None
        shares = {share.size for name, (_, share) in slices.cuts.items() if ".mlp." in name}
        assert shares == {size}


def test_layers_that_were_packed_are_gone(tmp_path: Path) -> None:
    """Or a rank would have its weights twice."""
    make_model("smollm3").save_pretrained(tmp_path)
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, nn.Linear)}
    slices = load_slices(tmp_path, ThreadCommunicator(Ranks(2), 1, 2))
    gc.collect()
    layers = [each for each in gc.get_objects() if isinstance(each, nn.Linear) and id(each) not in before]
    assert slices.num_layers == 2 and [layer for layer in layers if not layer.weight.is_meta] == []


# ---- what is refused ------------------------------------------------------------------------------------------------


def expect_refusal(path: Path, world_size: int, message: str) -> None:
    for rank in (0, world_size - 1):
        with pytest.raises(ArgumentError) as error:
            build_slices(path, rank, world_size)
        assert re.fullmatch(f"tensor_parallel_size: expected {message}, got {world_size}", str(error.value))


@pytest.mark.parametrize(
    ("model_type", "world_size", "message"),
    [
        (
            "stablelm",
            2,
            "1, as StableLmForCausalLM runs .*, and ranks cannot share it: transformers has no plan for it",
        ),
        ("gemma2", 3, "a divisor of the 4 query heads of the model"),
        ("mixtral", 32, "a divisor of the 4 query heads of the model"),
        ("olmo2", 60, r"at most 48, the size of what ranks share of model\.layers\.\*\.self_attn\.q_proj"),
    ],
)
def test_models_that_ranks_cannot_share(tmp_path: Path, model_type: str, world_size: int, message: str) -> None:
    config = make_config(model_type)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    expect_refusal(tmp_path, world_size, message)


@pytest.mark.parametrize(
    ("layer", "word", "reason"),
    [
        ("mlp.up_proj", "sequence_parallel", "its plan says sequence_parallel of {}, which is not supported"),
        ("mlp", "rowwise", "its plan says rowwise of {}, which is not supported"),  # which is no linear layer
        ("self_attn.q_norm", "colwise", "its plan says colwise of {}, which is not supported"),
        ("self_attn.v_proj", "colwise", "its slices attend with other heads than those of a rank"),
        ("mlp.gate_proj", "replicate", "a trial run fails with RuntimeError: .*"),
    ],
)
def test_plans_that_are_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str, word: str, reason: str
) -> None:
    plan = Olmo2Config.base_model_tp_plan | {f"layers.*.{layer}": word}
    monkeypatch.setattr(Olmo2Config, "base_model_tp_plan", plan)
    make_config("olmo2", architectures=["Olmo2ForCausalLM"]).save_pretrained(tmp_path)
    cannot = "1, as Olmo2ForCausalLM runs through transformers .*, and ranks cannot share it"
    expect_refusal(tmp_path, 2, f"{cannot}: {reason.format(re.escape(f'model.layers.*.{layer}'))}")


def test_a_wrong_attention_is_found_by_a_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("smollm3").save_pretrained(tmp_path)
    attention = transformers_model.attention
    monkeypatch.setattr(transformers_model, "attention", lambda *args, **kw: attention(*args, **kw).flip(0))
    with pytest.raises(ValueError, match="its logits are not those that it has with its own attention"):
        load_slices(tmp_path, ThreadCommunicator(Ranks(2), 1, 2))
