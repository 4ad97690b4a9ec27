"""Which files of a directory hold its weights: one rule for the families with a file here, and for those that run
through transformers. What is not read is named in a warning."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import change_config, convert_to_bin, make_model
from quantized_checkpoints import assert_same_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.loading.quantize import quantize_checkpoint
from pagedattn_serve.models.partition import Partition
from pagedattn_serve.models.transformers_slices import Alone

FAMILIES = ["native", "through transformers"]
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def make(family: str) -> PreTrainedModel:
    if family == "native":
        return make_model("llama-gqa")
    config = AutoConfig.for_model(
        "olmo2",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    return AutoModelForCausalLM.from_config(config)


class Source:
    """A checkpoint in four forms, each in a directory: whole and sharded, of safetensors and of torch.

    other: the same with other weights.
    """

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory
        model = make(family)
        for weights in ("own", "other"):
            for form, size in (("whole", "1GB"), ("sharded", "12KB")):
                for end in ("safetensors", "bin"):
                    path = directory / weights / f"{form}.{end}"
                    model.save_pretrained(path, max_shard_size=size)
                    if end == "bin":
                        convert_to_bin(path)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.neg_()
        self.model = load_model(directory / "own" / "whole.safetensors")
        self.shards = sorted(file.name for file in (directory / "own" / "sharded.safetensors").glob("*.safetensors"))

    def put(self, form: str, directory: Path) -> None:
        """The files of a form, beside what is there."""
        shutil.copytree(self.directory / form, directory, dirs_exist_ok=True)


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("source"), request.param)


# Whose weights are read; what lies beside them, with other weights; what is removed of both.
BESIDE = {
    "a stale index": ("whole.safetensors", "sharded.safetensors", ()),
    "a bin beside a whole file": ("whole.safetensors", "whole.bin", ()),
    "a bin beside shards": ("sharded.safetensors", "whole.bin", ()),
    "shards of torch beside shards": ("sharded.safetensors", "sharded.bin", ()),
    "a stale index of torch": ("whole.bin", "sharded.bin", ()),
    "a bin beside shards without an index": ("whole.bin", "sharded.safetensors", (INDEX,)),
    "both without an index": ("sharded.safetensors", "sharded.bin", (INDEX, BIN_INDEX)),
}
# A file that does not count, whatever is in it.
STRAY = [
    ("whole.safetensors", INDEX, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
    ("whole.safetensors", INDEX, "{"),
    ("whole.safetensors", "consolidated.safetensors", ""),
    ("whole.safetensors", "adapter_model.safetensors", ""),
    ("sharded.safetensors", "consolidated.safetensors", ""),
    ("sharded.safetensors", "model-00099-of-00099.safetensors", ""),  # a shard that the index does not name
    ("sharded.bin", "pytorch_model-00099-of-00099.bin", ""),
]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("checkpoint_files")]


def expect_warning(caplog: pytest.LogCaptureFixture, directory: Path, left: list[str]) -> None:
    """One that names all that is not read."""
    [warning] = warnings(caplog)
    more = f" and {len(left) - 8} more" if len(left) > 8 else ""
    assert warning.startswith(f"{directory}: the weights are those in ")
    assert warning.endswith(f"; not read: {', '.join(sorted(left)[:8])}{more}")


@pytest.mark.parametrize("case", BESIDE)
def test_weights_beside_other_weights(
    source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    form, beside, gone = BESIDE[case]
    source.put(f"other/{beside}", tmp_path)
    left = [file.name for file in tmp_path.iterdir() if "model" in file.name and file.name not in gone]
    source.put(f"own/{form}", tmp_path)
    for name in gone:
        (tmp_path / name).unlink(missing_ok=True)
    assert_same_tensors(load_model(tmp_path), source.model)
    expect_warning(caplog, tmp_path, left)


@pytest.mark.parametrize(("form", "name", "content"), STRAY)
def test_a_file_that_does_not_count(
    source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, name: str, content: str
) -> None:
    source.put(f"own/{form}", tmp_path)
    (tmp_path / name).write_text(content)
    assert_same_tensors(load_model(tmp_path), source.model)
    expect_warning(caplog, tmp_path, [name])


def test_a_file_that_the_config_names(source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.put("own/whole.safetensors", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "mine.safetensors")
    source.put("other/whole.safetensors", tmp_path)
    change_config(tmp_path, transformers_weights="mine.safetensors")
    assert_same_tensors(load_model(tmp_path), source.model)
    expect_warning(caplog, tmp_path, ["model.safetensors"])


def test_the_copy_of_a_file_that_the_config_names(tmp_path: Path) -> None:
    """It is called as others are."""
    make("native").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "mine.safetensors")
    change_config(tmp_path / "model", transformers_weights="mine.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8")
    mine, wanted = (load_model(tmp_path / name, quantization="int8") for name in ("out", "model"))
    assert_same_tensors(mine, wanted)


def test_shards(source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor may lie in two of them, if it is the same; the index need not have its sizes."""
    source.put("own/sharded.safetensors", tmp_path)
    last = tmp_path / source.shards[-1]
    tensors = load_file(tmp_path / source.shards[0]) | load_file(last)
    save_file(tensors, last, metadata={"format": "pt"})
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_same_tensors(load_model(tmp_path), source.model)
    (tmp_path / INDEX).unlink()
    assert_same_tensors(load_model(tmp_path), source.model)
    assert warnings(caplog) == []


def test_ranks_warn_once(source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.put("own/whole.safetensors", tmp_path)
    source.put("other/whole.bin", tmp_path)
    for rank in range(2):
        load_model(tmp_path, partition=Partition(rank, 2, Alone(rank, 2)))
    assert len(warnings(caplog)) == 1


def test_the_copy_that_is_quantized_has_the_same_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Source(tmp_path / "source", "native")
    source.put("other/sharded.safetensors", tmp_path / "model")
    source.put("own/whole.safetensors", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8")
    expect_warning(caplog, tmp_path / "model", [INDEX, *source.shards])
    expected = load_model(tmp_path / "source" / "own" / "whole.safetensors", quantization="int8")
    assert_same_tensors(load_model(tmp_path / "out", quantization="int8"), expected)


# ---- what is refused ------------------------------------------------------------------------------------------------


def change_shard(directory: Path, shard: str, other: str) -> None:
    """Let a shard hold a tensor of another shard as well, with other numbers."""
    tensors = load_file(directory / shard)
    name, tensor = next(iter(load_file(directory / other).items()))
    save_file(tensors | {name: tensor + 1}, directory / shard, metadata={"format": "pt"})


@pytest.mark.parametrize("has_index", [True, False])
def test_a_tensor_of_which_two_files_have_different_ones(source: Source, tmp_path: Path, has_index: bool) -> None:
    """Which one counted hung on the order of names."""
    source.put("own/sharded.safetensors", tmp_path)
    if not has_index:
        (tmp_path / INDEX).unlink()
    first, *_, last = source.shards
    change_shard(tmp_path, last, first)
    with pytest.raises(ValueError, match=rf"^model: expected one \S+ in {tmp_path}, got .* in {first} and {last}$"):
        load_model(tmp_path)


def test_a_shard_that_is_not_there(source: Source, tmp_path: Path) -> None:
    source.put("own/sharded.safetensors", tmp_path)
    (tmp_path / source.shards[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"expected {source.shards[1]} in {tmp_path}, as {INDEX} names it"):
        load_model(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=rf"the weights in {tmp_path} do not fit .*: missing "):
        load_model(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}"])
def test_a_wrong_index(source: Source, tmp_path: Path, content: str) -> None:
    source.put("own/sharded.safetensors", tmp_path)
    index = tmp_path / INDEX
    index.write_text(content)
    with pytest.raises(ValueError, match=f"^{index}: expected a JSON object, got |expected .* in {index}, got "):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["gone.safetensors", "pytorch_model.bin", "../model.safetensors", 3])
def test_a_config_that_names_no_file(source: Source, tmp_path: Path, name: object) -> None:
    source.put("own/whole.safetensors", tmp_path)
    source.put("own/whole.bin", tmp_path)
    change_config(tmp_path, transformers_weights=name)
    with pytest.raises(ValueError, match=r"^transformers_weights: expected the name of a safetensors file or index in"):
        load_model(tmp_path)


def test_a_bin_of_a_training_run(source: Source, tmp_path: Path) -> None:
    """Its state dict is one level down, beside what is no tensor."""
    source.put("own/whole.bin", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"state_dict": torch.load(file), "epoch": 3}, file)
    with pytest.raises(ValueError, match=rf"the weights in {tmp_path} do not fit .*: missing "):
        load_model(tmp_path)
