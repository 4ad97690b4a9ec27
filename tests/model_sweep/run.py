"""Sweeps the causal language models of transformers: makes a tiny random one of each, runs it in the engine, and
compares its tokens with those of `generate`. Prints the table of docs/serving.md. By hand: make sweep-models.

    make sweep-models [TYPES="qwen3_5 mamba2"]

Each model has a process of its own, so that none can end the sweep. A model type without a tiny config is not tried:
TINY below has the configs that are tried, one after the other, until one gives a model of at most MAX_PARAMETERS.
"""

import multiprocessing
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from checkpoints import MAX_LEN, SMALL, VOCAB_SIZE
from engine_runs import run, token_ids
from test_transformers_models import (
    EXPERTS,
    LAYERS,
    MLA,
    MODELS,
    SHAPE,
    make_config,
    make_model,
    prompts_of,
    references,
)
from test_transformers_states import FAMILIES, HYBRID
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.loader import build_model
from pagedattn_serve.sampling_params import SamplingParams

SECONDS = 120  # for one model
MAX_PARAMETERS = 8_000_000
NUM_TOKENS = 12
# Sizes under the names that some configs have for them. A config takes what it does not know, too.
SIZES: dict[str, Any] = dict(
    d_model=48, d_ff=72, d_kv=12, ffn_dim=72, n_inner=72, n_positions=MAX_LEN, rotary_dim=8, decoder_layers=2,
    decoder_attention_heads=4, decoder_ffn_dim=72, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=72,
    num_decoder_layers=2, num_encoder_layers=1, num_layers=2, n_layers=2, dff=72, embedding_size=48,
)  # fmt: skip
OF_IMAGES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
# What some configs have `generate` do to the logits, which is no work of the model: the engine warns of it.
PLAIN = dict(forced_eos_token_id=None, begin_suppress_tokens=None, encoder_no_repeat_ngram_size=0)
TINY: list[dict[str, Any]] = [
    {},
    EXPERTS,
    LAYERS,
    dict(head_dim=12),
    dict(**LAYERS, head_dim=16),
    dict(**EXPERTS, head_dim=16),
    dict(**EXPERTS, **LAYERS),
    MLA,
    dict(num_key_value_heads=4),
]
# What a model type needs besides.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(**MLA, layer_types=HYBRID),
    "cwm": dict(bos_token_id=0, eos_token_id=VOCAB_SIZE),
    "gemma4": dict(
        text_config={**SHAPE, **MODELS["gemma4_text"], "pad_token_id": 0}, audio_config=None,
        vision_config=dict(OF_IMAGES, position_embedding_size=64),
    ),
    "lfm3": FAMILIES["lfm2"][0],
    "modernbert-decoder": dict(
        LAYERS, pad_token_id=0, bos_token_id=0, cls_token_id=0, sep_token_id=0, eos_token_id=VOCAB_SIZE
    ),
    "phi4_multimodal": dict(
        vision_config=dict(OF_IMAGES, crop_size=28, image_token_id=1),
        audio_config=dict(OF_IMAGES, num_blocks=1, ext_pw_out_channel=16, nemo_conv_channels=16, audio_token_id=2),
    ),
    "qwen3_5_moe_text": FAMILIES["qwen3_next"][0],
}  # fmt: skip
EQUAL, WITH_STATES, DIFFERS, NOT_TRIED = "equal to `generate`", "equal, with states", "differs", "not tried"
# Of a refusal: what it begins with, and how the table says it.
REFUSALS = {
    "keeps another state|it has layers of type|has no known state": "state of another kind, or layers of other types",
    r"its layers do not|the mask of layer|of its \d+ layers": "attention or masks do not go through the interface",
    "its forward takes no position_ids|its forward does not take": "forward takes no positions, or no rows to sample",
    "its logits are not those": "positions counted otherwise",
    r"layer \d+ attends to later tokens": "not causal",
    r"layer \d+ calls attention twice": "attention called twice by a layer",
    "its forward looks at numbers": "the trial run without weights needs numbers",
}


def tiny_model(model_type: str) -> PreTrainedModel | None:
    """The first model that a config of TINY makes, and that generates."""
    own = MODELS | {name: fields for name, (fields, _) in FAMILIES.items()} | OWN
    known = [own[name] for name in (model_type, f"{model_type}_text") if name in own]
    for fields in known + TINY:
        fields = as_decoder(model_type) | fields
        parts = dict(text_config={**SHAPE, **SIZES, **fields}, vision_config=OF_IMAGES, audio_config=OF_IMAGES)
        for arguments in (fields, {**SIZES, **fields}, parts):
            try:
                if size_of(model_type, arguments) > MAX_PARAMETERS:
                    continue
                model = make_model(model_type, **arguments)
                model.generation_config.update(**PLAIN)
                references(model, prompts_of(model_type, (3,)), 2)
            except Exception:
                continue
            return model
    return None


def as_decoder(model_type: str) -> dict[str, Any]:
    """Without these fields, models of BERT's kind are encoders."""
    may_be_one = "is_decoder" in CONFIG_MAPPING[model_type].__dataclass_fields__
    return dict(is_decoder=True, pad_token_id=1) if may_be_one else {}


def refusal_of(model_type: str) -> str:
    """What the config by default is refused for; NOT_TRIED if it is not refused, or makes no model."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = AutoConfig.for_model(model_type, **as_decoder(model_type))
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
            config.save_pretrained(directory)
            build_model(directory)
        except Exception as error:
            if "architecture: " in str(error) and "a trial run fails" not in str(error):
                return f"refused: {error}"
    return NOT_TRIED


def size_of(model_type: str, fields: dict[str, Any]) -> int:
    """The number of a model's parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(model_type, **fields))
    return sum(parameter.numel() for parameter in model.parameters())


def outcome_of(model_type: str) -> str:
    model = tiny_model(model_type)
    if model is None:
        return refusal_of(model_type)
    prompts = prompts_of(model_type, (1, 7, 17, 33, 5, 9, 12, 3))
    expected = references(model, prompts, NUM_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        try:
            engine = LLMEngine(directory, **SMALL)
        except ValueError as error:
            return f"refused: {error}"
        outputs = run(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    if token_ids(outputs) != expected:
        return DIFFERS
    return WITH_STATES if engine.model_runner.model.states else EQUAL


def send_outcome(model_type: str, pipe: Connection) -> None:
    try:
        pipe.send(outcome_of(model_type))
    except Exception as error:
        pipe.send(f"fails with {type(error).__name__}: {error}")


def in_a_process(model_type: str) -> str:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_outcome, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        return str(ours.recv()) if ours.poll(SECONDS) else f"fails: more than {SECONDS} s"
    except EOFError:
        return "fails: its process ended"
    finally:
        process.kill()
        process.join()


def rows_of(outcomes: dict[str, str]) -> Iterator[str]:
    """The rows of the table: a kind of outcome, and the model types that have it."""
    types_of: defaultdict[str, list[str]] = defaultdict(list)
    for model_type, outcome in outcomes.items():
        kind = outcome
        if outcome.startswith("refused: "):
            reason = outcome.rpartition(": ")[2] if "a trial run fails" not in outcome else "a trial run fails"
            kinds = (f"refused: {kind}" for start, kind in REFUSALS.items() if re.search(start, outcome))
            kind = next(kinds, f"refused: {reason}")
        types_of[kind].append(model_type)
    first = [EQUAL, WITH_STATES]
    for kind in [*first, *sorted(types_of.keys() - set(first))]:
        yield f"| {kind} ({len(types_of[kind])}) | {', '.join(types_of[kind])} |"


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    outcomes = {}
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        outcomes[model_type] = in_a_process(model_type)
        print(f"{model_type}: {outcomes[model_type]}", file=sys.stderr, flush=True)
    print(f"transformers {transformers.__version__}: {len(outcomes)} model types\n\n| | |\n|---|---|")
    print("\n".join(rows_of(outcomes)))


if __name__ == "__main__":
    main()
