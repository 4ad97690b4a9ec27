"""Engines with quantized weights: their tokens, whatever is in the batch, their memory, and the doors."""

import logging
import re
from pathlib import Path

import pytest
import torch
from checkpoints import VARIANTS, Checkpoint, greedy_reference, make_model
from engine_runs import finish_all, run, token_ids
from quantized_checkpoints import linear_layers, matrix, quantize_inputs, set_matrix
from torch import nn
from transformers import AutoModelForCausalLM, Olmo2Config

from pagedattn_serve.cli import main
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.llm import LLM
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, PackedLinear
from pagedattn_serve.models.quantization import dequantized, quantize_int4, quantize_int8
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
QUANTIZATIONS = ["int8", "int4"]


def nbytes(engine: LLMEngine) -> int:
    """Of all that linear layers hold."""
    packed = PackedLinear | Int8Linear | Int4Linear
    layers = [module for module in engine.model_runner.model.modules() if isinstance(module, packed)]
    return sum(held.nbytes for layer in layers for held in vars(layer).values() if isinstance(held, torch.Tensor))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa-tied-bias", "gpt2", "opt-350m", "bloom-8-heads"])
def test_greedy_tokens_are_those_of_plain_torch(tmp_path: Path, name: str, quantization: str) -> None:
    """In fp32, with weights that are quantized and made floats again, and rows that are rounded as the layers do it."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = [[3], [(5 * i) % 97 for i in range(20)]]

    def is_int4(layer_name: str, layer: nn.Module) -> bool:
        return quantization == "int4" and layer_name != "lm_head" and matrix(layer).shape[1] % 32 == 0

    for layer_name, layer in linear_layers(model).items():
        quantize = quantize_int4 if is_int4(layer_name, layer) else quantize_int8
        set_matrix(layer, dequantized(quantize(matrix(layer))))  # the embedding, if it was tied, stays as it is
    reference = quantize_inputs(model, lambda layer_name, layer: 32 if is_int4(layer_name, layer) else None)
    expected = [greedy_reference(reference, prompt, 16) for prompt in prompts]
    assert token_ids(run(LLMEngine(tmp_path, quantization=quantization), prompts, GREEDY)) == expected


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_request_does_not_depend_on_its_batch(llama: Checkpoint, quantization: str) -> None:
    """Bit by bit, alone or among 20 others that come and go."""

    def result(engine: LLMEngine, num_others: int) -> list[tuple[int, float]]:
        engine.add_request("own", prompt_token_ids=llama.prompts[4], sampling_params=GREEDY)
        for i in range(num_others):
            params = SamplingParams(temperature=0, max_tokens=3 + i)
            engine.add_request(f"other {i}", prompt_token_ids=[i] * (i + 1), sampling_params=params)
        completion = finish_all(engine)["own"][-1].outputs[0]
        assert completion.logprobs is not None
        logprobs = zip(completion.token_ids, completion.logprobs, strict=True)
        return [(token_id, entries[token_id].logprob) for token_id, entries in logprobs]

    engine = LLMEngine(llama.path, quantization=quantization, enable_prefix_caching=False)
    alone = result(engine, 0)
    assert len(alone) == 16
    assert result(engine, 20) == alone


@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa-tied-bias"])
def test_quantized_weights_are_small_and_there_once(tmp_path: Path, name: str) -> None:
    make_model(name, vocab_size=4000).save_pretrained(tmp_path)
    floats = nbytes(LLMEngine(tmp_path))
    for quantization in QUANTIZATIONS:
        engine = LLMEngine(tmp_path, quantization=quantization)
        assert nbytes(engine) < 0.3 * floats
        names = [name for name, parameter in engine.model_runner.model.named_parameters() if parameter.dim() > 1]
        assert names == ["model.embed_tokens.weight"]  # of the float weights, nothing else is left


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_of_16_bits_keeps_them_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    make_model("llama-mha").to(dtype).save_pretrained(tmp_path)
    engine = LLMEngine(tmp_path, dtype="float32")
    packed = [module for module in engine.model_runner.model.modules() if isinstance(module, PackedLinear)]
    assert {layer.packed_weight.dtype for layer in packed} == {dtype}


def test_a_bf16_checkpoint_in_fp16_keeps_its_weights(tmp_path: Path) -> None:
    """Those that fp16 cannot hold, too."""
    model = make_model("llama-mha").to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = 1e-30
    model.save_pretrained(tmp_path)
    layer = LLMEngine(tmp_path, dtype="float16").model_runner.model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, PackedLinear) and layer.packed_weight.dtype == torch.bfloat16
    assert (layer.packed_weight == torch.tensor(1e-30).bfloat16()).sum() == 1


def test_through_transformers(tmp_path: Path) -> None:
    """Every linear layer whose forward is torch's, after the model has been compared with its own attention."""
    shape = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96, vocab_size=97)
    AutoModelForCausalLM.from_config(Olmo2Config(**shape, pad_token_id=None)).save_pretrained(tmp_path)
    engine = LLMEngine(tmp_path, quantization="int4")
    kinds = [type(module) for module in engine.model_runner.model.modules()]
    assert kinds.count(Int4Linear) == 2 * 7 and kinds.count(Int8Linear) == 1 and nn.Linear not in kinds
    assert run(engine, [[1, 2, 3]], GREEDY)[0].finished


def test_every_family_runs(tmp_path: Path) -> None:
    for name in VARIANTS:
        make_model(name).save_pretrained(tmp_path / name)
        engine = LLMEngine(tmp_path / name, quantization="int4")
        assert len(run(engine, [[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == 16


# ---- doors ----------------------------------------------------------------------------------------------------------


def test_the_doors(llama: Checkpoint, text_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    llm = LLM(llama.path, quantization="int8")
    by_llm = llm.generate(prompt_token_ids=llama.prompts, sampling_params=params, use_tqdm=False)
    by_engine = run(LLMEngine(llama.path, quantization="int8"), llama.prompts, params)
    assert token_ids(by_llm) == token_ids(by_engine)
    capsys.readouterr()
    assert main(["generate", text_model, "--quantization", "int8", "--prompt", "the cat", "--max-tokens", "4"]) == 0
    assert main(["generate", text_model, "--quantization", "int3", "--prompt", "the cat"]) == 2
    assert "quantization: expected None, int8 or int4 (leave it out" in capsys.readouterr().err


def test_info_says_what_this_machine_would_run(llama: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    forms = {}
    for options in ([], ["--quantization", "int8"], ["--quantization", "int4"]):
        assert main(["info", llama.path, *options]) == 0
        [line] = re.findall(r"^linear layers  (.*) \(on the CPU\)$", capsys.readouterr().out, re.MULTILINE)
        forms[options[-1] if options else None] = line
    assert forms == {
        None: PackedLinear.FORM,
        "int8": Int8Linear.FORM,
        "int4": Int8Linear.FORM,  # of 48, 72 and 80 inputs, none a multiple of 32
    }


def test_the_log_names_the_choice(llama: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedattn_serve"):
        LLMEngine(llama.path, quantization="int8")
    assert [r.getMessage() for r in caplog.records if "linear" in r.getMessage()] == [
        f"linear layers: {Int8Linear.FORM}"
    ]
