"""Checkpoints that come quantized: the weights that they mean, the tokens that follow, or a refusal by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, change_config, greedy_reference
from engine_runs import run, token_ids
from quantized_checkpoints import (
    AWQ,
    CONFIGS,
    GPTQ,
    INT8,
    ROWS_OF_8_BITS,
    SHAPES,
    assert_same_tensors,
    compressed,
    linear_layers,
    matrix,
    pack,
    quantize,
    quantize_inputs,
    quantize_saved,
    save_quantized,
    save_quantized_model,
    set_matrix,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.checkpoint_formats import Anew
from pagedattn_serve.loading.loader import build_model, describe_linear_layers, linear_forms, load_model
from pagedattn_serve.loading.quantized_checkpoint import checkpoint_format, parse_format
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, PackedLinear
from pagedattn_serve.models.partition import SlicedLinear
from pagedattn_serve.models.quantization import Int4Weight, dequantized, quantize_int8
from pagedattn_serve.sampling_params import SamplingParams

PROMPTS = [[5], [(3 * i) % 97 for i in range(30)]]
LAYER = "model.layers.0.self_attn"


def change_weights(directory: Path, **changes: Tensor | None) -> None:
    """Set tensors of the first layer's attention, by name with "__" for a dot; None removes one."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        name = f"{LAYER}.{name.replace('__', '.')}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ---- what is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_are_the_checkpoint_s(tmp_path: Path, name: str, config: str) -> None:
    """A row with a single one comes through its quantization, and shows the weights of an input."""
    stored = parse_format(CONFIGS[config])
    meant = {
        layer: dequantized(quantize_int8(matrix(module))) if isinstance(stored, Anew) else matrix(module)
        for layer, module in linear_layers(save_quantized(tmp_path, name, CONFIGS[config])).items()
    }
    plain, model = build_model(tmp_path), load_model(tmp_path)
    count = 0
    for layer_name, layer in plain.named_modules():
        if not isinstance(layer, SlicedLinear) or layer_name == "lm_head":
            continue
        packed = model.get_submodule(layer_name)
        assert type(packed) is (Int8Linear if stored.QUANTIZATION == "int8" else Int4Linear)
        parts = layer.checkpoint_parts(layer_name)
        weight = torch.cat(layer.parts_from_checkpoint("codes", [meant[part] for part in parts]))
        with torch.inference_mode():
            shown = packed(torch.eye(layer.in_features)) - (0 if packed.bias is None else packed.bias)
        torch.testing.assert_close(shown, weight.t(), rtol=1e-5, atol=1e-5)
        count += len(parts)
    assert count == len(meant) - 1
    assert type(model.lm_head) is PackedLinear


@pytest.mark.parametrize(("name", "config"), [("llama-gqa", "int8"), ("llama-gqa", "int4-zeros"), ("gpt2", "gptq-v2")])
def test_greedy_tokens_are_those_of_plain_torch(tmp_path: Path, name: str, config: str) -> None:
    """In fp32, with the weights that the checkpoint means, and rows quantized as the layers do it."""
    meant = save_quantized(tmp_path, name, CONFIGS[config])
    size = None if config == "int8" else 32
    reference = quantize_inputs(meant, lambda name, layer: 0 if name == "lm_head" else size)
    expected = [greedy_reference(reference, prompt, 24) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=24)
    assert token_ids(run(LLMEngine(tmp_path), PROMPTS, params)) == expected


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("gemma2", "gptq-zeros-64"), ("phi3", "awq"), ("phi3", "int8"), ("olmo2", "int4"), ("granite", "gptq-act-order")],
)
def test_models_that_run_through_transformers(tmp_path: Path, model_type: str, config: str) -> None:
    """Tokens, as above. Layers are as the checkpoint has them."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    others = dict(num_key_value_heads=2, vocab_size=97, eos_token_id=None, pad_token_id=0, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape, **others)).eval()
    meant = save_quantized_model(model, tmp_path, CONFIGS[config])
    stored = parse_format(CONFIGS[config])
    for name, layer in linear_layers(meant).items():
        if isinstance(stored, Anew) and name != "lm_head":
            set_matrix(layer, dequantized(quantize_int8(matrix(layer))))
    size = None if stored.QUANTIZATION == "int8" else 64 if config.endswith("-64") else 32
    reference = quantize_inputs(meant, lambda name, layer: 0 if name == "lm_head" else size)
    expected = [greedy_reference(reference, prompt, 24) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=24)
    engine = LLMEngine(tmp_path)
    assert token_ids(run(engine, PROMPTS, params)) == expected
    kinds = [type(layer) for layer in engine.model_runner.model.modules()]
    kind = Int8Linear if stored.QUANTIZATION == "int8" else Int4Linear
    assert kinds.count(kind) == len(linear_layers(meant)) - 1


def test_layers_that_transformers_calls_otherwise(tmp_path: Path) -> None:
    """The text part of a model that sees images, whose layers have the places of the text's layers."""
    text = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=97)
    images = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=28)
    images |= dict(patch_size=14)
    ids = dict(image_token_index=96, boi_token_index=95, eoi_token_index=94, mm_tokens_per_image=4)
    fields = dict(text_config=text | dict(num_key_value_heads=4, head_dim=16), vision_config=images)
    Gemma3ForConditionalGeneration(Gemma3Config(**fields, **ids)).save_pretrained(tmp_path)
    quantize_saved(tmp_path, GPTQ, lambda name: "language_model" in name and name.endswith("proj.weight"))
    layers = dict(load_model(tmp_path).named_modules())
    packed = {name for name, layer in layers.items() if isinstance(layer, Int4Linear)}
    assert len(packed) == 7 and all(name.startswith("model.model.language_model.layers.0") for name in packed)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_experts_are_floats_or_quantized_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quantization: str | None
) -> None:
    """As transformers makes one tensor of them all. The log says so."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quantize_saved(tmp_path, GPTQ, lambda name: name.endswith("proj.weight"))
    loaded = load_model(tmp_path, quantization=quantization)
    assert "24 of 32 layers that the checkpoint has quantized are floats here, such as model.layers" in caplog.text
    assert sum(isinstance(layer, Int4Linear) for layer in loaded.modules()) == 8
    experts = {type(layer).__name__ for layer in loaded.modules() if "Experts" in type(layer).__name__}
    assert experts == {"Experts"} | ({"Int4Experts"} if quantization else {"PackedExperts"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q_proj__scales=torch.ones(3, 64)), r"scales: expected \[2, 64\], got \[3, 64\]"),
        (dict(q_proj__qzeros=None), "missing qzeros"),
        (dict(q_proj__qweight=torch.ones(8, 64)), "qweight: expected torch.int32, got torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_each_other(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    """Of a model that runs through transformers."""
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=97)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **shape))
    save_quantized_model(model, tmp_path, GPTQ)
    change_weights(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"^model: cannot read {LAYER}.q_proj: {message}$"):
        load_model(tmp_path)


def test_layers_that_are_left_as_they_are(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama-gqa", AWQ, leave=lambda name: "o_proj" in name or "layers.1" in name)
    model = load_model(tmp_path)
    kinds = [type(module) for module in model.modules() if isinstance(module, PackedLinear | Int4Linear)]
    assert kinds.count(Int4Linear) == 3 and kinds.count(PackedLinear) == 1 + 4 + 1


def test_zeros_for_a_bias_that_the_layer_does_not_have(tmp_path: Path) -> None:
    """As the first GPTQ checkpoints have it."""
    save_quantized(tmp_path, "llama-gqa", GPTQ)
    change_weights(tmp_path, q_proj__bias=torch.zeros(64))
    load_model(tmp_path)
    change_weights(tmp_path, q_proj__bias=torch.ones(64))
    with pytest.raises(
        ValueError, match=r"model: cannot read .*q_proj: bias: expected none, or zeros, got numbers up to 1"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_gptq_without_g_idx_has_its_groups_in_order(tmp_path: Path, name: str) -> None:
    """Some programs write g_idx only where it says something."""
    save_quantized(tmp_path, name, CONFIGS["gptq-zeros-64" if name == "gpt2" else "gptq"])
    expected = load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(tensor.endswith(".g_idx") for tensor in tensors)
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert_same_tensors(load_model(tmp_path), expected)


def test_the_option_beside_a_quantized_checkpoint(tmp_path: Path) -> None:
    """It says what becomes of the layers that the checkpoint has not quantized."""
    save_quantized(tmp_path, "llama-gqa", GPTQ)
    model, stored = build_model(tmp_path), checkpoint_format(tmp_path)
    words = describe_linear_layers(model, stored, linear_forms(model, stored, "int4"))
    assert words.startswith("int4, in groups of 32, as gptq made it") and words.endswith(Int8Linear.FORM)
    for quantization, form in (("int4", Int8Linear), (None, PackedLinear)):
        assert isinstance(load_model(tmp_path, quantization=quantization).lm_head, form)
    with pytest.raises(ValueError, match=r"quantization: expected None or int4, in which gptq .*, got int8"):
        load_model(tmp_path, quantization="int8")
    with pytest.raises(ValueError, match=r"quantization_config: expected none on cuda, .* for the CPU"):
        linear_forms(model, stored, None, "cuda")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_cuda_has_no_quantized_weights(llama: Checkpoint, quantization: str) -> None:
    model = build_model(llama.path)
    assert linear_forms(model, None, None, "cuda:1") is None
    with pytest.raises(ValueError, match=r"quantization: expected None on cuda:1, .* for the CPU"):
        linear_forms(model, None, quantization, "cuda:1")


# ---- zeros ----------------------------------------------------------------------------------------------------------

V2 = GPTQ | dict(checkpoint_format="gptq_v2")


def save_with_zeros(directory: Path, config: dict[str, Any], stored: list[int]) -> None:
    """A checkpoint, lm_head included, whose groups all have the zero 8: as `stored` says, groups taking turns."""
    model = save_quantized(directory, "llama-gqa", config | dict(sym=True), vocab_size=96)
    packed, _ = quantize(matrix(model.lm_head), config | dict(sym=True))
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
    for name, tensor in tensors.items():
        if name.endswith("qzeros"):
            zeros = torch.tensor(stored).repeat(8 * tensor.numel())[: 8 * tensor.numel()]
            tensors[name] = pack(zeros.view(len(tensor), -1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=config)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (GPTQ, 7),
        (GPTQ, 8),
        (V2, 7),
        (V2, 8),
        (GPTQ | dict(sym=None), 8),  # says as little as without the field
        (V2 | dict(sym=None), 7),
        (GPTQ | dict(sym=False), 7),
        (V2 | dict(sym=False), 8),
        (GPTQ | dict(sym=False, format="gptq_v2"), 8),  # another name of checkpoint_format
        (AWQ, 8),
        (AWQ | dict(sym=True), 8),
    ],
)
def test_zeros_of_symmetric_weights(tmp_path: Path, config: dict[str, Any], stored: int) -> None:
    """Programs write 7 or 8 and mean 8. To take them at the word of checkpoint_format would load garbage."""
    save_with_zeros(tmp_path / "plain", AWQ if config["quant_method"] == "awq" else V2, [8])
    save_with_zeros(tmp_path / "model", config, [stored])
    model = load_model(tmp_path / "model")
    assert type(model.lm_head) is Int4Linear
    assert_same_tensors(model, load_model(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("config", "stored", "meant"),
    [
        (GPTQ | dict(sym=False), 8, 9),
        (V2 | dict(sym=False), 7, 7),
        (GPTQ | dict(sym=False), 15, 0),  # one less than 0
        (V2 | dict(sym=None), 9, 9),
        (AWQ, 7, 7),
    ],
)
def test_zeros_of_other_weights(tmp_path: Path, config: dict[str, Any], stored: int, meant: int) -> None:
    """Nothing but the format says what they are."""
    save_with_zeros(tmp_path / "plain", AWQ if config["quant_method"] == "awq" else V2 | dict(sym=False), [meant])
    save_with_zeros(tmp_path / "model", config, [stored])
    assert_same_tensors(load_model(tmp_path / "model"), load_model(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        (GPTQ, [9], "7 in all places or 8 in all places, as sym is true in quantization_config, got 9 to 9"),
        (GPTQ, [7, 8], "7 in all places or 8 in all places, .* got 7 to 8"),
        (V2, [0, 15], "7 in all places or 8 in all places, .* got 0 to 15"),
        (AWQ | dict(sym=True), [7], "8 in all places, as sym is true in quantization_config, got 7 to 7"),
    ],
)
def test_zeros_that_symmetric_weights_cannot_have(
    tmp_path: Path, config: dict[str, Any], stored: list[int], expected: str
) -> None:
    save_with_zeros(tmp_path, config, stored)
    with pytest.raises(ValueError, match=f"cannot read .*_proj: qzeros: expected zeros of {expected}$"):
        load_model(tmp_path)


def test_zeros_of_a_head_that_is_not_symmetric(tmp_path: Path) -> None:
    """Its zeros are looked at as those of any layer."""
    save_with_zeros(tmp_path, GPTQ, [7])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.qzeros"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"cannot read lm_head: qzeros: expected zeros of 7 .*, got 7 to 8"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "order", "message"),
    [
        ("gptq-act-order", None, "expected the group of each input, 0 to 1, got none"),
        ("gptq-act-order", torch.full((64,), 2), "expected the group of each input, 0 to 1, got 2 to 2"),
        ("gptq-8-bits", torch.arange(64) % 2, "expected groups in order, got other ones"),
        ("gptq-8-bits", torch.arange(64) // 32 + 100, "expected groups in order, got other ones"),
    ],
)
def test_groups_of_inputs_that_do_not_fit(tmp_path: Path, config: str, order: Tensor | None, message: str) -> None:
    save_quantized(tmp_path, "llama-gqa", CONFIGS[config])
    change_weights(tmp_path, q_proj__g_idx=None if order is None else order.int())
    with pytest.raises(ValueError, match=f"^model: cannot read {LAYER}.q_proj: g_idx: {message}$"):
        load_model(tmp_path)


def test_zeros_and_scales_of_compressed_tensors() -> None:
    """Of 12 outputs, whose zeros lie in two elements of eight. The scales are such as bf16 has, and fp16 has not."""
    stored = parse_format(CONFIGS["int4-zeros"])
    zeros = torch.arange(16).view(16, 1)
    scales = torch.tensor([1e-7, 7e4] * 6, dtype=torch.bfloat16).view(12, 1)
    codes = torch.zeros(12, 4, dtype=torch.int32)
    tensors = dict(weight_packed=codes, weight_scale=scales, weight_zero_point=pack(zeros.t()).t())
    weight = stored.unpack(tensors)
    assert isinstance(weight, Int4Weight)
    assert torch.equal(weight.zeros, zeros[:12].to(torch.uint8))
    assert torch.equal(weight.scales.float(), scales.float())


# ---- what is refused ------------------------------------------------------------------------------------------------

INT4 = compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32)
ZEROS = CONFIGS["int4-zeros"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(quant_method="hqq"), "quant_method: expected compressed-tensors or gptq or awq or fp8 or .*, got 'hqq'"),
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "quant_method: .*, got 'bitsandbytes'"),
    (dict(bits=4), "quant_method: .*, got none"),
    (GPTQ | dict(bits=3), "bits: expected 4 or 8, got 3"),
    (GPTQ | dict(desc_act="yes"), "desc_act: expected False or True, got 'yes'"),
    (GPTQ | dict(checkpoint_format="marlin"), "checkpoint_format: expected gptq or gptq_v2, got 'marlin'"),
    (GPTQ | dict(is_marlin_format=True), "is_marlin_format: expected False"),
    (GPTQ | dict(dynamic={"+:.*down_proj": {"bits": 8}}), "dynamic: expected None"),
    (GPTQ | dict(group_size=None), "group_size: expected -1 or an int >= 1, got None"),
    (GPTQ | dict(group_size=0), "group_size: expected -1 or an int >= 1, got 0"),
    (GPTQ | dict(checkpoint_format="gptq", format="gptq_v2"), "format: expected gptq, got 'gptq_v2'"),
    (GPTQ | dict(sym="true"), "sym: expected True or False or None, got 'true'"),
    (AWQ | dict(sym="true"), "sym: expected True or False or None, got 'true'"),
    (AWQ | dict(bits=8), "bits: expected 4, got 8"),
    (AWQ | dict(version="gemv"), "version: expected gemm or GEMM, got 'gemv'"),
    (AWQ | dict(zero_point=False), "zero_point: expected True, got False"),
    (INT8 | dict(format="naive-quantized"), "format: expected int-quantized or pack-quantized or float-quantized, got"),
    (INT8 | dict(format="marlin-24"), "format: .*, got 'marlin-24'"),
    (INT8 | dict(sparsity_config=dict(format="sparse-24-bitmask")), "format: expected dense"),
    (INT8 | dict(config_groups={}), "config_groups: expected one group of layers, got 0"),
    (INT8 | dict(config_groups={"a": {}, "b": {}}), "config_groups: expected one group of layers, got 2"),
    (INT8 | dict(config_groups=["Linear"]), "config_groups: expected an object, got"),
    (INT8 | dict(config_groups={"a": "int8"}), "a: expected an object, got 'int8'"),
    (compressed("int-quantized", None, num_bits=8, strategy="channel"), "num_bits: expected 8, got none"),
    (
        compressed("int-quantized", ROWS_OF_8_BITS | dict(dynamic=False), num_bits=8, strategy="channel"),
        "dynamic: expected True, got False",
    ),
    (
        compressed("int-quantized", ROWS_OF_8_BITS | dict(strategy="tensor"), num_bits=8, strategy="channel"),
        "strategy: expected token, got 'tensor'",
    ),
    (
        compressed("int-quantized", ROWS_OF_8_BITS, num_bits=8, strategy="channel", symmetric=False),
        "symmetric: expected True, got False",
    ),
    (compressed("int-quantized", ROWS_OF_8_BITS, num_bits=4, strategy="channel"), "num_bits: expected 8, got 4"),
    (compressed("pack-quantized", None, num_bits=2, strategy="channel"), "num_bits: expected 4 or 8, got 2"),
    (compressed("pack-quantized", ROWS_OF_8_BITS, num_bits=4, strategy="group", group_size=32), "input_activations"),
    (
        compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32, actorder="row"),
        "actorder: expected None or weight or static or group or dynamic, got 'row'",
    ),
    (
        compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32, symmetric="false"),
        "symmetric: expected True or False, got 'false'",
    ),
    (
        compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32, type="float"),
        "type: expected int",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_other_formats_are_refused_before_weights_are_read(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    save_quantized(tmp_path, "llama-gqa", GPTQ)
    change_config(tmp_path, quantization_config=config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^quantization_config: {message}"):
        load_model(tmp_path)


def test_the_older_name_of_a_quantization_config(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama-gqa", GPTQ)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["compression_config"] = fields.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert checkpoint_format(tmp_path) == parse_format(GPTQ)


@pytest.mark.parametrize(("config", "size"), [(GPTQ, 48), (AWQ, 8), (INT4, 16)])
def test_group_sizes_that_the_op_does_not_have(tmp_path: Path, config: dict[str, Any], size: int) -> None:
    save_quantized(tmp_path, "llama-gqa", config)
    other = config | dict(group_size=size)
    if config is INT4:
        other = compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=size)
    change_config(tmp_path, quantization_config=other)
    message = rf"cannot read .*q_proj: .*group_size: expected a multiple of 32 and a divisor of its 64 .*, got {size}"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_number_of_bits_that_was_written_as_a_float(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama-gqa", CONFIGS["gptq-act-order"])
    expected = load_model(tmp_path)
    change_config(tmp_path, quantization_config=CONFIGS["gptq-act-order"] | dict(bits=4.0))
    assert_same_tensors(load_model(tmp_path), expected)


def test_groups_in_another_order(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama-gqa", GPTQ)
    change_weights(tmp_path, o_proj__g_idx=torch.arange(64, dtype=torch.int32) % 2)
    with pytest.raises(ValueError, match=r"cannot read .*o_proj: g_idx: expected groups in order, got other ones"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPTQ, dict(q_proj__scales=None), "missing {}.q_proj.scales"),
        (GPTQ, dict(q_proj__qweight=None), "missing {}.q_proj.qweight"),
        (GPTQ, dict(q_proj__scales=torch.ones(1, 64)), r"{}.q_proj.scales: expected \[2, 64\], got \[1, 64\]"),
        (GPTQ, dict(q_proj__perm=torch.ones(64)), "unexpected {}.q_proj.perm"),
        (GPTQ, dict(q_proj__qweight=torch.zeros(8, 64)), "{}.q_proj: qweight: expected torch.int32, got torch.float32"),
        (INT8, dict(v_proj__weight=torch.ones(32, 64)), "{}.v_proj: weight: expected torch.int8, got torch.float32"),
        (INT8, dict(v_proj__weight_scale=torch.ones(1)), r"{}.v_proj.weight_scale: expected \[32, 1\], got \[1\]"),
        (INT4, dict(q_proj__weight_zero_point=torch.zeros(8, 2).int()), "unexpected {}.q_proj.weight_zero_point"),
        (INT8, dict(q_proj__weight_zero_point=torch.zeros(64, 1)), "unexpected {}.q_proj.weight_zero_point"),
        (ZEROS, dict(q_proj__weight_zero_point=None), "missing {}.q_proj.weight_zero_point"),
        (INT4, dict(k_proj__weight_packed=None, k_proj__weight=torch.ones(32, 64)), "missing {}.k_proj.weight_packed"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Tensor | None], message: str
) -> None:
    save_quantized(tmp_path, "llama-gqa", config)
    change_weights(tmp_path, **changes)
    with pytest.raises(ValueError, match=message.format(LAYER)):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        (GPTQ, "scales", (2, 64)),
        (CONFIGS["gptq-8-bits"], "scales", (2, 64)),
        (AWQ, "scales", (2, 64)),
        (INT4, "weight_scale", (64, 2)),
        (INT8, "weight_scale", (64, 1)),
    ],
)
def test_scales_of_a_dtype_that_no_layer_has(
    tmp_path: Path, config: dict[str, Any], name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Catches scales that become floats whatever they are, and an error of an op, which names no layer."""
    save_quantized(tmp_path, "llama-gqa", config)
    change_weights(tmp_path, **{f"o_proj__{name}": torch.ones(shape).to(dtype)})
    message = f"^model: cannot read {LAYER}.o_proj: {name}: expected torch.float32 or .*, got {dtype}$"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)
