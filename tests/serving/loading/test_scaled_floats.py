"""Checkpoints whose weights are floats of 8 or 4 bits with scales: the floats that are read, the logits that follow, or
a refusal by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, greedy_reference, make_model
from engine_runs import run, token_ids
from quantized_checkpoints import SHAPES, assert_same_tensors, compressed, linear_layers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagedattn_serve.calibration import run_alone
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.checkpoint_files import OpenFiles, open_checkpoint
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.loading.quantize import quantize_checkpoint
from pagedattn_serve.loading.scaled_floats import ScaledFloats
from pagedattn_serve.models.linear import Int4Linear, Int8Linear
from pagedattn_serve.sampling_params import SamplingParams

PROMPTS = [[5], [(3 * i) % 97 for i in range(30)]]
# Of models with experts, which run through transformers.
WITH_EXPERTS: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
)  # fmt: skip
LAYER = "model.layers.0.self_attn.q_proj"
BLOCK = [24, 20]  # divides neither the rows nor the columns of most weights


def of_8_bits(**weights: Any) -> dict[str, Any]:
    return compressed("float-quantized", dict(num_bits=8, type="float"), **dict(num_bits=8, type="float") | weights)


# By name: a quantization_config, the end of the name of scales, and the rows and columns that share one (0: all).
FORMS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "fp8-blocks": (dict(quant_method="fp8", weight_block_size=BLOCK), "weight_scale_inv", (24, 20)),
    "fp8-blocks-by-size": (dict(quant_method="fp8"), "weight_scale_inv", (4, 4)),
    "fp8-tensor": (dict(quant_method="fp8", activation_scheme="static"), "weight_scale", (0, 0)),
    "fbgemm": (dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0), "weight_scale", (1, 0)),
    "modelopt": (dict(quant_method="modelopt", quant_algo="FP8"), "weight_scale", (0, 0)),
    "compressed-tensor": (of_8_bits(strategy="tensor"), "weight_scale", (0, 0)),
    "compressed-channel": (of_8_bits(strategy="channel"), "weight_scale", (1, 0)),
    "compressed-blocks": (of_8_bits(strategy="block", block_structure=BLOCK), "weight_scale", (24, 20)),
}


def bf16_model() -> PreTrainedModel:
    return make_model("llama-gqa", **SHAPES["llama-gqa"]).bfloat16()


def save_scaled(directory: Path, form: str, dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Tensor]:
    """A checkpoint of 8-bit floats, but for the last layer. Returns the weights that it stands for, in bf16."""
    config, suffix, (height, width) = FORMS[form]
    model = bf16_model()
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    meant = {}
    for layer in linear_layers(model).keys() - {"lm_head"}:
        weight = tensors[f"{layer}.weight"].float()
        rows, columns = weight.shape
        block = torch.ones(height or rows, width or columns)
        scales = torch.rand(-(-rows // len(block)), -(-columns // block.shape[1]), generator=generator) / 100 + 1e-3
        of_weights = torch.kron(scales, block)[:rows, :columns]
        codes = (weight / of_weights).clamp(-448, 448).to(dtype)
        meant[f"{layer}.weight"] = (codes.float() * of_weights).bfloat16()
        tensors[f"{layer}.weight"] = codes
        tensors[f"{layer}.{suffix}"] = scales.view(()) if form == "fp8-tensor" else scales
        if height == 0:
            tensors[f"{layer}.input_scale"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=config)
    return meant


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_codes_and_scales_stand_for(tmp_path: Path, form: str) -> None:
    meant = save_scaled(tmp_path, form)
    with OpenFiles() as files:
        tensors = {name: read() for name, read in open_checkpoint(tmp_path, files).items()}
    assert tensors.keys() == bf16_model().state_dict().keys()
    for name, weight in meant.items():
        assert torch.equal(tensors[name], weight), name


def test_blocks_that_no_config_names_are_those_of_transformers() -> None:
    """Of 192 rows the second block has 64. Catches two blocks of 96."""
    scales = torch.tensor([[0.5], [2.0]])
    factors = ScaledFloats().factors(scales, torch.Size([192, 64]), "scales").expand(192, 64)
    assert torch.equal(factors, scales.repeat_interleave(128, 0)[:192].expand(192, 64))


def test_codes_and_scales_of_other_dtypes(tmp_path: Path) -> None:
    """Codes of e5m2, and scales that are powers of two alone."""
    meant = save_scaled(tmp_path, "fp8-blocks", dtype=torch.float8_e5m2)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{LAYER}.weight_scale_inv"
    tensors[name] = tensors[name].to(torch.float8_e8m0fnu)
    factors = torch.kron(tensors[name].float(), torch.ones(BLOCK))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with OpenFiles() as files:
        opened = open_checkpoint(tmp_path, files)
        codes = tensors[f"{LAYER}.weight"].float()
        expected = (codes * factors[: len(codes), : codes.shape[1]]).bfloat16()
        assert torch.equal(opened[f"{LAYER}.weight"](), expected)
        other = f"{LAYER.replace('q_proj', 'k_proj')}.weight"
        assert torch.equal(opened[other](), meant[other])


def test_greedy_tokens_are_those_of_plain_torch(tmp_path: Path) -> None:
    meant = save_scaled(tmp_path, "fp8-blocks")
    model = make_model("llama-gqa", **SHAPES["llama-gqa"])
    for name, parameter in model.named_parameters():
        parameter.data = meant.get(name, parameter.bfloat16()).float()
    expected = [greedy_reference(model, prompt, 24) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=24)
    assert token_ids(run(LLMEngine(tmp_path, dtype="float32"), PROMPTS, params)) == expected


def save_with_experts(directory: Path, model_type: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **WITH_EXPERTS | fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def logits_of(directory: Path, prompt: list[int]) -> Tensor:
    return torch.cat(list(run_alone(LLMEngine(directory, dtype="float32").model_runner, prompt, 64)))


@pytest.mark.parametrize(
    ("model_type", "fields"), [("deepseek_v3", MLA), ("qwen3_moe", {})], ids=["deepseek_v3", "qwen3_moe"]
)
def test_models_that_run_through_transformers(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    """Codes and scales by expert. Logits are those of the floats."""
    save_with_experts(tmp_path, model_type, **fields)
    tensors = load_file(tmp_path / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scales = torch.rand(len(tensors[name]) // 4, tensors[name].shape[1] // 4) / 100 + 1e-3
        factors = torch.kron(scales, torch.ones(4, 4))
        codes = (tensors[name] / factors).to(torch.float8_e4m3fn)
        meant[name] = codes.float() * factors
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(meant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(tmp_path, PROMPTS[1])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, quantization_config=dict(quant_method="fp8", weight_block_size=[4, 4]), dtype="float32")
    assert torch.equal(logits_of(tmp_path, PROMPTS[1]), expected)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss, whose checkpoints come in no other form."""
    model = save_with_experts(tmp_path, "gpt_oss")
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path, PROMPTS[1]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Int8Linear), ("int4", Int4Linear)])
def test_they_are_quantized_as_floats_are(tmp_path: Path, quantization: str, kind: type) -> None:
    save_scaled(tmp_path / "in", "fp8-blocks")
    model = load_model(tmp_path / "in", quantization=quantization)
    assert any(isinstance(module, kind) for module in model.modules())
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", quantization)
    assert "weight_block_size" not in (tmp_path / "out" / "config.json").read_text()
    assert_same_tensors(load_model(tmp_path / "out", quantization=quantization), model)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(quant_method="fp8", weight_block_size=128), "weight_block_size: expected two ints >= 1, got 128"),
    (dict(quant_method="fp8", weight_block_size=[128, 0]), r"weight_block_size: .*, got \[128, 0\]"),
    (dict(quant_method="modelopt", quant_algo="NVFP4"), "quant_algo: expected FP8, got 'NVFP4'"),
    (of_8_bits(strategy="group"), "strategy: expected tensor or channel or block, got 'group'"),
    (of_8_bits(strategy="tensor", num_bits=4), "num_bits: expected 8, got 4"),
    (of_8_bits(strategy="tensor", type="int"), "type: expected float, got 'int'"),
    (of_8_bits(strategy="block", block_structure="128x128"), "block_structure: expected two ints"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_a_config_that_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    save_scaled(tmp_path, "fp8-blocks")
    change_config(tmp_path, quantization_config=config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^quantization_config: {message}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale_inv": torch.ones(2, 3)}, r"weight_scale_inv: expected shape \[3, 4\], got \[2, 3\]"),
        ({"weight_scale_inv": torch.ones(2, 2, 2)}, r"weight_scale_inv: expected one scale, or 2 axes of them, got \["),
        ({"weight_scale_inv": torch.ones(3, 3, dtype=torch.int32)}, r"weight_scale_inv: expected floats, got torch\.i"),
        ({"weight": torch.ones(80, 48)}, r"weight: expected floats of 8 bits, got torch\.float32"),
        ({"weight_scale_inv": None}, r"weight in floats of 16 bits or more"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    save_scaled(tmp_path, "fp8-blocks")
    tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{LAYER}.{name}": tensor for name, tensor in changes.items()}
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(there, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{LAYER}.{message}"):
        load_model(tmp_path)
