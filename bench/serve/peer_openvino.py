"""OpenVINO GenAI's continuous batching beside the engine, on a graph of the same LLaMA.

This file writes the graph in the forms that OpenVINO knows. OpenVINO finds attention in the graph and puts a paged
cache there; it fuses norms, rotary embedding and decompression of weights. Optimum usually makes such graphs, but it
wants another transformers than this project. int8 has a scale for each output. int4 has a scale for each 128 inputs, or
64, and 8 bits for the embedding and the last layer; OpenVINO's own compression does this by default.

OpenVINO is told to compute in bf16 on a CPU with instructions for it, where this engine computes in bf16 as well. With
fp32 weights it is told to compute in fp32, because all engines must give the same tokens there. OpenVINO's cache has 8
bits by default, or the format of the arithmetic. The workload decides which of the two is faster, so each is a peer of
its own.
"""

import json
import shutil
from pathlib import Path

import numpy
import openvino
import openvino_genai
from openvino import Node
from openvino import opset15 as ov
from safetensors.torch import load_file

from serve.peers import Loaded, measure
from serve.run import Run
from serve.workloads import Request

CACHE_GIB = 2
MAX_BATCH_TOKENS, MAX_SEQUENCES = 2048, 256
END = 2**62


def load(model: str, weight_format: str, threads: int, made: str, quantized_cache: bool) -> Loaded:
    """model: directory of a LLaMA; made: one to write to, which may have its graph already."""
    directory = Path(made) / "openvino"
    if not directory.exists():
        directory.mkdir()
        shutil.copy(Path(model) / "config.json", directory)
        openvino.save_model(Llama(Path(model), weight_format).graph(), directory / "openvino_model.xml", False)
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIB
    scheduling.max_num_batched_tokens = MAX_BATCH_TOKENS
    scheduling.max_num_seqs = MAX_SEQUENCES
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    has_bfloat16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    in_bfloat16 = has_bfloat16 and weight_format != "float32"
    arithmetic = openvino.Type.bf16 if in_bfloat16 else openvino.Type.f32
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": arithmetic,
        "KV_CACHE_PRECISION": openvino.Type.u8 if quantized_cache else arithmetic,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduling, "CPU", properties)
    settings = ", ".join(f"{name}={value}" for name, value in properties.items())

    def serve(requests: list[Request]) -> Run:
        prompts = [openvino.Tensor(numpy.array([request.prompt_token_ids])) for request in requests]
        configs = [greedy(request.max_tokens) for request in requests]
        return measure(lambda: [list(each.m_generation_ids[0]) for each in pipeline.generate(prompts, configs)])

    return Loaded(serve, f"{settings}, version={openvino_genai.__version__}")


def greedy(max_tokens: int) -> object:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    return config


class Llama:
    """A LLaMA as a graph with its cache as state: [batch, num_kv_heads, num_tokens, head_size] for each layer."""

    def __init__(self, model: Path, weight_format: str) -> None:
        self.config = json.loads((model / "config.json").read_text())
        self.weights = {name: tensor.float().numpy() for name, tensor in load_file(model / "model.safetensors").items()}
        self.weight_format = weight_format
        self.num_heads, self.num_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.head_size = self.config["head_dim"]
        self.token_ids, self.mask, self.positions = (
            parameter(name, [-1, -1], numpy.int64) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.beams = parameter("beam_idx", [-1], numpy.int32)
        self.batch_size = ov.gather(ov.shape_of(self.token_ids), ints(0), whole(0))
        self.cosines, self.sines = self.rotary_table()
        self.states: list[Node] = []

    def graph(self) -> openvino.Model:
        hidden = ov.gather(self.weight("model.embed_tokens"), self.token_ids, whole(0))
        for i in range(self.config["num_hidden_layers"]):
            hidden = self.layer(hidden, f"model.layers.{i}", i)
        logits = ov.result(self.linear(self.norm(hidden, "model.norm"), "lm_head"))
        logits.output(0).get_tensor().set_names({"logits"})
        parameters = [self.token_ids, self.mask, self.positions, self.beams]
        return openvino.Model([logits], self.states, parameters, "llama")

    def layer(self, hidden: Node, name: str, idx: int) -> Node:
        normed = self.norm(hidden, f"{name}.input_layernorm")
        query = self.rotate(self.heads(normed, f"{name}.self_attn.q_proj", self.num_heads))
        key = self.rotate(self.heads(normed, f"{name}.self_attn.k_proj", self.num_kv_heads))
        value = self.heads(normed, f"{name}.self_attn.v_proj", self.num_kv_heads)
        key, value = self.cached(key, f"{idx}.key"), self.cached(value, f"{idx}.value")
        mask = ov.unsqueeze(ov.convert(self.mask, "f32"), ints(1, 2))  # for the form alone: paged attention has its own
        attended = ov.scaled_dot_product_attention(query, self.repeated(key), self.repeated(value), mask)
        attended = ov.reshape(
            ov.transpose(attended, ints(0, 2, 1, 3)), ints(0, 0, self.num_heads * self.head_size), True
        )
        hidden = ov.add(hidden, self.linear(attended, f"{name}.self_attn.o_proj"))
        normed = self.norm(hidden, f"{name}.post_attention_layernorm")
        gate = ov.swish(self.linear(normed, f"{name}.mlp.gate_proj"))
        gated = ov.multiply(gate, self.linear(normed, f"{name}.mlp.up_proj"))
        return ov.add(hidden, self.linear(gated, f"{name}.mlp.down_proj"))

    def heads(self, hidden: Node, name: str, num_heads: int) -> Node:
        rows = ov.reshape(self.linear(hidden, name), ints(0, 0, num_heads, self.head_size), True)
        return ov.transpose(rows, ints(0, 2, 1, 3))

    def cached(self, new: Node, name: str) -> Node:
        """The state of this name, to which the new tokens are added."""
        shape = ov.concat([self.batch_size, ints(self.num_kv_heads), ints(0), ints(self.head_size)], 0)
        shape_of_state = openvino.PartialShape([-1, self.num_kv_heads, -1, self.head_size])
        state = ov.read_value(ov.broadcast(floats(0), shape), name, openvino.Type.f32, shape_of_state)
        all_tokens = ov.concat([ov.gather(state, self.beams, whole(0)), new], -2)
        self.states.append(ov.assign(all_tokens, name))
        return all_tokens

    def repeated(self, heads: Node) -> Node:
        """Each key or value head once for every query head that it serves."""
        if self.num_heads == self.num_kv_heads:
            return heads
        sizes = [ov.gather(ov.shape_of(heads), ints(i), whole(0)) for i in range(4)]
        shape = ov.concat([*sizes[:2], ints(self.num_heads // self.num_kv_heads), *sizes[2:]], 0)
        groups = ov.broadcast(ov.unsqueeze(heads, ints(2)), shape, "BIDIRECTIONAL")
        return ov.reshape(groups, ints(0, self.num_heads, -1, self.head_size), True)

    def rotary_table(self) -> tuple[Node, Node]:
        exponents = numpy.arange(0, self.head_size, 2) / self.head_size
        frequencies = self.config["rope_parameters"]["rope_theta"] ** -exponents
        positions = ov.convert(ov.unsqueeze(self.positions, ints(1)), "f32")
        angles = ov.transpose(ov.matmul(floats(frequencies[None, :, None]), positions, False, False), ints(0, 2, 1))
        angles = ov.concat([angles, angles], -1)
        return ov.unsqueeze(ov.cos(angles), ints(1)), ov.unsqueeze(ov.sin(angles), ints(1))

    def rotate(self, heads: Node) -> Node:
        half = self.head_size // 2
        first, second = (
            ov.slice(heads, ints(begin), ints(end), ints(1), ints(3)) for begin, end in ((0, half), (half, END))
        )
        turned = ov.concat([ov.multiply(second, floats([[[[-1]]]])), first], -1)
        return ov.add(ov.multiply(heads, self.cosines), ov.multiply(turned, self.sines))

    def norm(self, hidden: Node, name: str) -> Node:
        mean = ov.reduce_mean(ov.power(hidden, floats([[[2]]])), ints(-1), True)
        root = ov.sqrt(ov.add(mean, floats([[[self.config["rms_norm_eps"]]]])))
        normed = ov.multiply(hidden, ov.divide(floats([[[1]]]), root))
        return ov.multiply(normed, floats(self.weights[f"{name}.weight"][None, None]))

    def linear(self, hidden: Node, name: str) -> Node:
        return ov.matmul(hidden, self.weight(name), False, True)

    def weight(self, name: str) -> Node:
        """[out_features, in_features], in fp32 from the format in which it is kept."""
        weight = self.weights[f"{name}.weight"]
        if self.weight_format == "float32":
            return ov.constant(weight)
        if self.weight_format in ("float16", "bfloat16"):
            kept = openvino.Type.f16 if self.weight_format == "float16" else openvino.Type.bf16
            return ov.convert(ov.constant(weight, kept), "f32")
        if self.weight_format == "int8" or name in ("model.embed_tokens", "lm_head"):
            scale = numpy.abs(weight).max(axis=1, keepdims=True) / 127
            return ov.multiply(
                ov.convert(ov.constant(numpy.rint(weight / scale), openvino.Type.i8), "f32"), floats(scale)
            )
        groups = weight.reshape(len(weight), -1, 128 if weight.shape[1] % 128 == 0 else 64)
        scale = numpy.abs(groups).max(axis=2, keepdims=True) / 7
        codes = ov.constant(numpy.rint(groups / scale), openvino.Type.i4)
        return ov.reshape(ov.multiply(ov.convert(codes, "f32"), floats(scale)), ints(*weight.shape), False)


def parameter(name: str, shape: list[int], data_type: type) -> Node:
    made = ov.parameter(shape, data_type, name=name)
    made.output(0).get_tensor().set_names({name})
    return made


def ints(*values: int) -> Node:
    return ov.constant(numpy.array(values, numpy.int64))


def whole(value: int) -> Node:
    return ov.constant(numpy.int64(value))


def floats(values: object) -> Node:
    return ov.constant(numpy.array(values, numpy.float32))
