"""The folder of `make hub`, as Hugging Face's `kernels` loads it: by the names of kernels-community/paged-attention."""

import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from kernels import get_kernel, get_loaded_kernels, get_local_kernel

from pagedattn_ext import ops

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_for_paged_attention_of_the_hub(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "release" / "hub.py", tmp_path], check=True)
    kernel = get_local_kernel(tmp_path)
    [loaded] = [each for each in get_loaded_kernels() if each.module is kernel]
    assert loaded.metadata.id == kernel.__name__
    assert kernel.ops is not ops  # a copy of its own

    name = "kernels-community/paged-attention"
    os.environ["LOCAL_KERNELS"] = f"{name}={tmp_path}"
    assert get_kernel(name, version=1) is kernel

    num_blocks, num_kv_heads, head_size, block_size, x = 8, 2, 64, 16, 4
    key_cache = torch.zeros(num_blocks, num_kv_heads, head_size // x, block_size, x)
    value_cache = torch.zeros(num_blocks, num_kv_heads, head_size, block_size)
    key, value, query = torch.randn(20, 2, 64), torch.randn(20, 2, 64), torch.randn(1, 8, 64)
    kernel.reshape_and_cache(key, value, key_cache, value_cache, torch.arange(16, 36), "auto", 1.0, 1.0)
    kernel.copy_blocks([key_cache], [value_cache], torch.tensor([[1, 5], [2, 4]]))
    tables, lens = torch.tensor([[5, 4]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    out = torch.empty_like(query)
    kernel.paged_attention_v1(
        out, query, key_cache, value_cache, num_kv_heads, 0.125, tables, lens, block_size, 20, None, "auto", 1.0, 1.0
    )
    keys, values = (tensor.repeat_interleave(4, dim=1).transpose(0, 1) for tensor in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1), keys, values, scale=0.125)
    torch.testing.assert_close(out, expected.transpose(0, 1))
