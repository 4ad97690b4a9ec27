"""What a model's directory says about generation: how to sample by default, and which tokens end an output."""

import logging
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pagedattn_serve.config import check_int
from pagedattn_serve.errors import BadArgument
from pagedattn_serve.loading.directory import read_json
from pagedattn_serve.loading.gguf_file import GgufFile, is_gguf
from pagedattn_serve.loading.gguf_model import generation_fields
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
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
# Fields that beam search ignores, and fields that nothing but beam search reads.
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
OF_BEAMS = {"num_beams": "best_of", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
# Fields that would change the output and cannot be honoured, with the values that change nothing. None never does.
NOT_HONOURED: dict[str, Any] = {
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "guidance_scale": 1,
    "min_length": 0,
    "max_time": None,
    "force_words_ids": None,
    "constraints": None,
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
    """What holds for requests that bring no parameters of their own.

    params: all that SamplingParams can say.
    max_length: most tokens of a request, with its prompt; None: no limit. If the file has max_length and no
        max_new_tokens, params.max_tokens is None.
    bad_words: sequences of tokens that an output must never complete, as in `TokenRules`.
    """

    params: SamplingParams
    max_length: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


def generation_defaults(directory: Path) -> GenerationDefaults:
    """The defaults in generation_config.json. What the file does not say is as in `SamplingParams`.

    One warning names the fields that are not honoured. Raises ValueError, with the file and the field, for a value that
    is not valid.
    """
    path, content = file_fields(directory, FILE)
    fields = {name: value for name, value in content.items() if value is not None}
    ignored = [name for name, none in NOT_HONOURED.items() if fields.get(name, none) != none]
    max_length, eos_ids = None, eos_token_ids(directory)
    try:
        do_sample = fields.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            raise ValueError(f"do_sample: expected true or false, got {do_sample!r}")
        chosen = {own: fields[name] for name, own in HONOURED.items() if name in fields}
        for own, value in chosen.items():
            _params({"max_tokens": None, own: value})
        if do_sample is False:
            chosen["temperature"] = 0
        check_int("num_beams", num_beams := fields.get("num_beams", 1), 1)
        if num_beams > 1 and do_sample:
            ignored.append("num_beams")
        elif num_beams > 1:
            beams = {own: fields[name] for name, own in OF_BEAMS.items() if name in fields}
            chosen = {own: value for own, value in chosen.items() if own not in OF_SAMPLING} | beams
            chosen |= {"temperature": 0, "use_beam_search": True}
        if "max_length" in fields and "max_tokens" not in chosen:
            check_int("max_length", fields["max_length"], 1)
            max_length, chosen["max_tokens"] = fields["max_length"], None
        elif "min_tokens" in chosen:
            chosen.setdefault("max_tokens", max(chosen["min_tokens"], SamplingParams().max_tokens or 0))
        if "sequence_bias" in fields:
            bias = _bias_of_tokens(fields["sequence_bias"])
            if bias is None:
                ignored.append("sequence_bias")
            chosen["logit_bias"] = bias
        bad_words = _bad_words(fields, eos_ids)
        params = _params(chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if ignored:
        logger.warning("%s: not honoured: %s", path, ", ".join(f"{name} {fields[name]!r}" for name in ignored))
    return GenerationDefaults(params, max_length, bad_words)


def file_fields(directory: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """The path and the fields of a JSON file in the model's directory; no fields if there is no such file. For a GGUF
    file, its path and what it says in place of generation_config.json."""
    if is_gguf(directory):
        return directory, generation_fields(GgufFile.open(directory))
    path = directory / name
    return path, read_json(path) if path.is_file() else {}


def _params(chosen: dict[str, Any]) -> SamplingParams:
    """SamplingParams(**chosen). Errors name the fields as the file does."""
    try:
        return SamplingParams(**chosen)
    except BadArgument as error:
        names = {own: name for name, own in (HONOURED | OF_BEAMS).items()}
        raise error.renamed(names.get(error.argument, error.argument)) from None


def _bias_of_tokens(sequence_bias: Any) -> dict[int, float] | None:
    """A sequence_bias of single tokens, [[[token id], bias], ...], as a logit_bias; None if it is more than that."""
    try:
        bias = {token_id: value for [token_id], value in sequence_bias}
        SamplingParams(logit_bias=bias)
    except (TypeError, ValueError):
        return None
    return bias if len(bias) == len(sequence_bias) else None


def _bad_words(fields: dict[str, Any], eos_ids: set[int]) -> tuple[tuple[int, ...], ...]:
    """bad_words_ids, without words that are a single end-of-sequence token; and each of suppress_tokens as a word."""
    words = fields.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ValueError(f"bad_words_ids: expected a list of lists of token ids, got {words!r}")
    suppressed = fields.get("suppress_tokens", [])
    if not isinstance(suppressed, list):
        raise ValueError(f"suppress_tokens: expected a list of token ids, got {suppressed!r}")
    for name, lists in (("bad_words_ids", words), ("suppress_tokens", [suppressed])):
        for token_id in chain.from_iterable(lists):
            check_int(name, token_id, 0)
    words = [word for word in words if len(word) > 1 or word[0] not in eos_ids]
    return (*map(tuple, words), *((token_id,) for token_id in suppressed))


def eos_token_ids(directory: Path) -> set[int]:
    """The token ids that end an output: those of generation_config.json, or of config.json, or of its text part. A
    negative id is that of no token."""
    for name in (FILE, "config.json"):
        path, fields = file_fields(directory, name)
        eos = fields.get("eos_token_id")
        if eos is None and isinstance(text_part := fields.get("text_config"), dict):
            eos = text_part.get("eos_token_id")
        if eos is not None:
            token_ids = eos if isinstance(eos, list) else [eos]
            for token_id in token_ids:
                if not isinstance(token_id, int) or isinstance(token_id, bool):
                    raise ValueError(f"{path}: eos_token_id: expected an int or a list of ints, got {eos!r}")
            return {token_id for token_id in token_ids if token_id >= 0}
    return set()
