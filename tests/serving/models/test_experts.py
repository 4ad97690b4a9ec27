"""Experts of transformers' models: what their own loop computes, whatever the module; rows that do not know each other;
every format of weights."""

from typing import Any

import pytest
import torch
from engine_runs import run
from test_transformers_models import Save, make_model, model_of, prompts_of, save
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pagedattn_serve.cli import main
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.models.experts import (
    Experts,
    Int4Experts,
    Int8Experts,
    PackedExperts,
    RouterWeight,
    experts_of,
    pack_experts,
)
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, LinearForms
from pagedattn_serve.sampling_params import SamplingParams

__all__ = ["save"]  # the fixture

# More experts than a token has, and inputs that int4 can have.
SIZES: dict[str, Any] = dict(
    num_experts=16, num_local_experts=16, n_routed_experts=16, hidden_size=64, intermediate_size=64,
    moe_intermediate_size=32,
)  # fmt: skip


def experts_model(model_type: str, **fields: Any) -> Any:
    """The first module with experts of a model, which computes as its class has it."""
    model = make_model(model_type, **fields)
    model.set_experts_implementation("eager")
    return next(iter(experts_of(model).values()))


# Gate and up in one; transposed, with biases and a gate of its own; other activations; no gate.
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("qwen3_moe", dict(hidden_act="gelu_pytorch_tanh")),
        ("qwen3_moe", dict(hidden_act="relu")),
        ("nemotron_h", dict(layer_types=["moe", "full_attention"])),
    ],
    ids=str,
)
@pytest.mark.parametrize("top_k", [1, 3])
def test_equal_to_their_loop(model_type: str, fields: dict[str, Any], top_k: int) -> None:
    module = experts_model(model_type, **fields)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, module.down_proj.shape[2 if module.is_transposed else 1], generator=draw)
    expert_ids = torch.rand(9, 4, generator=draw).argsort(1)[:, :top_k]
    weights = torch.rand(9, top_k, generator=draw)
    with torch.no_grad():
        expected = module(hidden, expert_ids, weights)
        actual = Experts("experts", module, LinearForms("head", None))(hidden, expert_ids, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert all(parameter.dim() < 3 for parameter in module.parameters())  # no copy of the weights stays


def test_a_norm_behind_each_expert() -> None:
    """Which Muse Spark has, and no causal LM that runs here."""
    module = experts_model("mixtral")
    module.has_post_expert_norm, module.post_expert_norm = True, nn.RMSNorm(48)
    hidden, expert_ids, weights = torch.randn(3, 48), torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2)
    with torch.no_grad():
        expected = ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden, expert_ids, weights)
        actual = Experts("experts", module, LinearForms("head", None))(hidden, expert_ids, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_experts_of_other_ranks_give_zeros() -> None:
    experts = Experts("experts", experts_model("mixtral"), LinearForms("head", None), are_some=True)
    hidden, weights = torch.randn(3, 48), torch.ones(3, 2)
    with torch.no_grad():
        out = experts(hidden, torch.tensor([[0, 4], [4, 4], [2, 1]]), weights)
        alone = experts(hidden[:1], torch.tensor([[0]]), weights[:1, :1])
    assert torch.equal(out[0], alone[0]) and not out[1].any() and out[2].all()


@pytest.mark.parametrize(
    ("quantization", "form", "size_of_weight"),
    [(None, PackedExperts, 4), ("int8", Int8Experts, 1), ("int4", Int4Experts, 0.6)],
)
def test_quantization(save: Save, quantization: str | None, form: type[nn.Module], size_of_weight: float) -> None:
    path, model = save("qwen3_moe", **SIZES)
    engine = LLMEngine(path, quantization=quantization)
    experts = [module for module in model_of(engine).model.modules() if isinstance(module, Experts)]
    assert {type(layer) for module in experts for layer in (module.first, module.second)} == {form}
    weights = next(iter(experts_of(model).values()))
    assert experts[0].first.packed_weight.nbytes < 1.1 * size_of_weight * weights.gate_up_proj.numel()
    rows = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    expert_ids, of_experts = torch.arange(14).repeat(10).view(70, 2), torch.ones(70, 2)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        exact = weights(rows, expert_ids, of_experts)
        error = (experts[0](rows, expert_ids, of_experts) - exact).norm() / exact.norm()
    assert error < {None: 1e-5, "int8": 0.02, "int4": 0.15}[quantization]


def test_forms_of_experts_in_words(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """Each projection of each expert is a layer: here 8 of 48 inputs and 8 of 32, beside 6 of 48 and 2 of 64 before and
    behind attention, and the last one."""
    path, _ = save("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=32)
    capsys.readouterr()
    assert main(["info", path, "--quantization", "int4"]) == 0
    assert f"14 {Int8Linear.FORM}; 10 {Int4Linear.FORM} (on the CPU)" in capsys.readouterr().out


def test_weights_that_cannot_be_quantized() -> None:
    model = make_model("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 4] = torch.nan
    message = r"quantization: model\.layers\.1\.mlp\.experts\.down_proj: weight: expected elements between .*, got nan"
    with pytest.raises(ValueError, match=message):
        pack_experts(model, LinearForms("head", "int8"))


def results(engine: LLMEngine, prompts: list[list[int]]) -> list[tuple[tuple[int, ...], list[dict[int, float]]]]:
    """Tokens and logprobs."""
    outputs = [
        output.outputs[0] for output in run(engine, prompts, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    ]
    return [
        (tuple(output.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs])
        for output in outputs
    ]


FAMILIES = ["deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


# In fp32, families without torch's sigmoid: the last bits of its result depend on how many elements there are.
@pytest.mark.parametrize(
    ("model_type", "dtype", "quantization"),
    [
        *((family, "bfloat16", quantization) for family in FAMILIES for quantization in (None, "int8")),
        *((family, "float32", None) for family in ("mixtral", "qwen3_moe")),
    ],
)
def test_a_request_has_the_same_bits_alone(save: Save, model_type: str, dtype: str, quantization: str | None) -> None:
    path, _ = save(model_type, **SIZES)
    engine = LLMEngine(path, dtype=dtype, quantization=quantization)
    prompts = prompts_of(model_type, (1, 33, 7, 20))
    assert results(engine, prompts) == [results(engine, [prompt])[0] for prompt in prompts]


def test_routers() -> None:
    """Of a linear layer's own making, with a conversion before; what is no router keeps its weight."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8).bfloat16())
            self.bias = nn.Parameter(torch.randn(4).bfloat16())

        def forward(self, hidden: Tensor) -> Tensor:
            return nn.functional.linear(hidden.type(torch.float32), self.weight.type(torch.float32), self.bias.float())

    model = make_model("mixtral")
    model.router = router = Router()
    hidden = torch.randn(3, 8).bfloat16()
    with torch.no_grad():
        expected = router(hidden)
        pack_experts(model, LinearForms("head", None))
        actual = router(hidden)
    assert type(router.weight) is RouterWeight and type(actual) is Tensor and actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)
    assert type(router.weight + 1) is Tensor and router.weight.dtype == torch.bfloat16
    assert type(model.model.embed_tokens.weight) is nn.Parameter
