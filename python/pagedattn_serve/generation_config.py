"""What a model's directory says about generation: how to sample by default, and which tokens end an output."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedattn_serve.checkpoint import read_json
from pagedattn_serve.config import check_int
from pagedattn_serve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Fields that `SamplingParams` has, and its names for them.
HONOURED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
# Fields that would change the output and cannot be honoured, with the values that change nothing. None never does.
NOT_HONOURED: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "dola_layers": None,
}


@dataclass(slots=True, frozen=True)
class GenerationDefaults:
    """params: of a request that brings none of its own. max_length: most tokens of it, with its prompt; None: no limit.

    With max_length and no max_new_tokens, params.max_tokens is None.
    """

    params: SamplingParams
    max_length: int | None


def generation_defaults(directory: Path) -> GenerationDefaults:
    """Those of generation_config.json; what it does not say is as in `SamplingParams`.

    One warning names the fields that are not honoured. Raises ValueError, with the file and the field, for a value that
    is not valid.
    """
    path = directory / FILE
    content = read_json(path) if path.is_file() else {}
    fields = {name: value for name, value in content.items() if value is not None}
    chosen: dict[str, Any] = {}
    for name, own_name in HONOURED.items():
        if name in fields:
            try:
                SamplingParams(**{own_name: fields[name]})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {name}: {str(error).partition(': ')[2]}") from None
            chosen[own_name] = fields[name]
    do_sample = fields.get("do_sample", True)
    if not isinstance(do_sample, bool):
        raise ValueError(f"{path}: do_sample: expected true or false, got {do_sample!r}")
    if not do_sample:
        chosen["temperature"] = 0
    max_length = None
    if "max_length" in fields and "max_tokens" not in chosen:
        max_length, chosen["max_tokens"] = fields["max_length"], None
        try:
            check_int("max_length", max_length, 1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
    if others := [f"{name} {fields[name]!r}" for name, none in NOT_HONOURED.items() if fields.get(name, none) != none]:
        logger.warning("%s: not honoured: %s", path, ", ".join(others))
    return GenerationDefaults(SamplingParams(**chosen), max_length)


def eos_token_ids(directory: Path) -> set[int]:
    """The token ids that end an output: those of generation_config.json, or else of config.json."""
    for name in (FILE, "config.json"):
        path = directory / name
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            token_ids = eos if isinstance(eos, list) else [eos]
            for token_id in token_ids:
                if not isinstance(token_id, int) or isinstance(token_id, bool):
                    raise ValueError(f"{path}: eos_token_id: expected an int or a list of ints, got {eos!r}")
            return set(token_ids)
    return set()
