"""The modules of flash-attn beside its three functions: packed tensors, FlashAttention-3 and 4, vLLM's fork, and what
libraries import first."""

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from brute_force import attend_all, rows, starts
from checks import assert_close_to_reference, assert_memory_is_checked, assert_same_bits

from pagedattn_ext import flash_attn, flash_attn_interface, vllm_flash_attn
from pagedattn_ext.flash_attn import cute

HEADS, KV_HEADS = 4, 2
PARTS = (slice(0, 4), slice(4, 4), slice(4, 6))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(49)
        yield


# ---- signatures ------------------------------------------------------------------------------------------------------

PACKED = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
DESCALES = "q_descale=None k_descale=None v_descale=None"
OF_3 = (
    f"softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
)
OF_4 = (
    "softmax_scale=None causal=False window_size=(None,None) learnable_sink=None softcap=0.0 num_splits=1 "
    "pack_gqa=None deterministic=False score_mod=None score_mod_bwd=None mask_mod=None"
)
OF_4_BACKWARD = "gather_bwd_recompute_p=False gather_bwd_token_chunk=None"
SIGNATURES: dict[Callable[..., Any], str] = {
    flash_attn.flash_attn_qkvpacked_func: f"qkv {PACKED}",
    flash_attn.flash_attn_kvpacked_func: f"q kv {PACKED}",
    flash_attn.flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {PACKED}",
    flash_attn.flash_attn_varlen_kvpacked_func: (f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {PACKED}"),
    flash_attn_interface.flash_attn_func: f"q k v {OF_3}",
    flash_attn_interface.flash_attn_qkvpacked_func: (
        f"qkv softmax_scale=None causal=False {DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
        "deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    flash_attn_interface.flash_attn_varlen_func: (
        f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None {OF_3}"
    ),
    flash_attn_interface.flash_attn_with_kvcache: (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
        f"max_seqlen_q=None rotary_seqlens=None {DESCALES} softmax_scale=None causal=False window_size=(-1,-1) "
        "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
        "sm_margin=0 return_softmax_lse=False"
    ),
    cute.flash_attn_func: (
        f"q k v qv=None gather_kv_indices=None {OF_4} aux_tensors=None aux_scalars=None block_sparse_tensors=None "
        f"block_sparse_tensors_bwd=None return_lse=False {OF_4_BACKWARD}"
    ),
    cute.flash_attn_varlen_func: (
        "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None "
        f"seqused_q=None seqused_k=None gather_kv_indices=None page_table=None {OF_4} block_sparse_tensors=None "
        "aux_tensors=None aux_scalars=None return_lse=False scheduler_metadata=None seqlen_k_per_split=None "
        f"disable_scheduler_metadata=False {OF_4_BACKWARD}"
    ),
    cute.interface.flash_attn_combine: (
        "out_partial lse_partial out=None out_dtype=None cu_seqlens=None seqused=None virtual_batch_idx=None "
        "return_lse=True"
    ),
    vllm_flash_attn.flash_attn_varlen_func: (
        "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None seqused_k=None q_v=None dropout_p=0.0 "
        "softmax_scale=None causal=False window_size=None softcap=0.0 alibi_slopes=None deterministic=False "
        "return_attn_probs=False block_table=None return_softmax_lse=False out=None scheduler_metadata=None "
        f"{DESCALES} num_splits=0 output_scale=None fa_version=2 s_aux=None cp_world_size=1 cp_rank=0 "
        "cp_tot_seqused_k=None mask_mod=None block_sparse_tensors=None aux_tensors=None aux_tensor_leading_dims=None "
        "dynamic_causal=None gather_kv_indices=None gather_kv_valid_length=None"
    ),
    vllm_flash_attn.get_scheduler_metadata: (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 "
        "headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 "
        "causal=False window_size=(-1,-1) has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signature(function: Callable[..., Any]) -> None:
    """Names, order and defaults, by which callers pass arguments without names."""
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    written = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in parameters]
    assert written == SIGNATURES[function].split()


# ---- what they compute -----------------------------------------------------------------------------------------------


def test_packed() -> None:
    qkv, kv = torch.randn(2, 5, 3, HEADS, 16), torch.randn(2, 7, 2, KV_HEADS, 16)
    q = qkv[:, :, 0]
    out, lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True, return_lse=True)
    assert_same_bits(out, expected[0])
    assert_same_bits(lse, expected[1])
    assert_same_bits(
        flash_attn.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True),
        flash_attn.flash_attn_func(q, *kv.unbind(2), softmax_scale=0.3, causal=True),
    )
    q, qkv, kv = q.flatten(0, 1), qkv.flatten(0, 1), kv.flatten(0, 1)
    cu_seqlens_q, cu_seqlens_k = starts([4, 6]), starts([9, 5])
    assert_same_bits(
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens_q, 6, causal=True),
        flash_attn.flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens_q, cu_seqlens_q, 6, 6, causal=True),
    )
    assert_same_bits(
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 6, 9, causal=True),
        flash_attn.flash_attn_varlen_func(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, 6, 9, causal=True),
    )


def test_packed_errors_name_what_the_caller_gave() -> None:
    qkv, cu_seqlens = torch.randn(5, 3, HEADS, 16), starts([2, 3])
    function = flash_attn.flash_attn_varlen_qkvpacked_func
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_qkvpacked_func: cu_seqlens: expected 0 first"):
        function(qkv, cu_seqlens + 1, 3)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_qkvpacked_func: qkv: expected 3 in dimension 1, got 2"):
        function(qkv[:, :2], cu_seqlens, 3)
    with pytest.raises(TypeError, match=r"^flash_attn_varlen_qkvpacked_func: softmax_scale: expected a number"):
        function(qkv, cu_seqlens, 3, 0.0, True)
    with pytest.raises(RuntimeError, match=r"^flash_attn_varlen_qkvpacked_func: qkv: requires grad"):
        function(qkv.requires_grad_(), cu_seqlens, 3)


def test_flash_attention_3() -> None:
    """Without names, `causal` is the fifth argument. return_attn_probs gives a pair."""
    q, k, v = (rows([n] * 2, heads) for n, heads in ((3, HEADS), (5, KV_HEADS), (5, KV_HEADS)))
    expected = attend_all(q, k, v, causal=True)
    out, lse = flash_attn_interface.flash_attn_func(*map(torch.stack, (q, k, v)), None, True, return_attn_probs=True)
    assert_close_to_reference(out, expected[0].view(out.shape))
    assert_close_to_reference(lse, expected[1].view(2, 3, HEADS).transpose(1, 2))
    out = flash_attn_interface.flash_attn_varlen_func(
        *map(torch.cat, (q, k, v)), starts([3, 3]), starts([5, 5]), 3, 5, None, None, None, True
    )
    assert_close_to_reference(out, expected[0])
    caches = torch.zeros(2, 2, 8, KV_HEADS, 16)
    results = flash_attn_interface.flash_attn_with_kvcache(
        torch.stack(q), *caches, *map(torch.stack, (k, v)), cache_seqlens=0, causal=True, return_softmax_lse=True
    )
    assert_close_to_reference(results[0].flatten(0, 1), expected[0])
    assert [result.numel() for result in results[2:]] == [0, 0]


def test_combine_of_flash_attention_3() -> None:
    """Results over the halves of the keys, one of them without keys, whose output may be anything."""
    q, k, v = torch.randn(2, 3, HEADS, 16), *torch.randn(2, 2, 6, KV_HEADS, 16)
    splits = [flash_attn.flash_attn_func(q, k[:, part], v[:, part], return_lse=True) for part in PARTS]
    out_partial, lse_partial = (torch.stack(each) for each in zip(*splits, strict=True))
    out_partial[1] = torch.nan
    out, lse = flash_attn_interface.flash_attn_combine(out_partial, lse_partial.transpose(-1, -2))
    expected = flash_attn.flash_attn_func(q, k, v, return_lse=True)
    assert_close_to_reference(out, expected[0])
    assert_close_to_reference(lse, expected[1].transpose(1, 2))
    pairs = [
        cute.interface.flash_attn_combine(out_partial, lse_partial.mT, return_lse=given) for given in (True, False)
    ]
    for (of_4, lse_of_4), right in zip(pairs, (lse, None), strict=True):
        assert_same_bits(of_4, out)
        assert lse_of_4 is right or torch.equal(lse_of_4, right)
    with pytest.raises(ValueError, match=r"^flash_attn_combine: out: expected shape"):
        flash_attn_interface.flash_attn_combine(
            out_partial, lse_partial.transpose(-1, -2), torch.empty(2, 1, HEADS, 16)
        )
    lse_partial[1, 0] = torch.nan
    merged = flash_attn_interface.flash_attn_combine(out_partial, lse_partial.transpose(-1, -2))
    for result, right in zip(merged, (out, lse), strict=True):
        assert result[0].isnan().all()
        assert_same_bits(result[1], right[1])


@pytest.mark.parametrize("module", [flash_attn_interface, cute.interface])
def test_memory_for_combined_results_is_checked(module: Any) -> None:
    """It may have another float dtype."""
    out_partial, lse_partial = torch.randn(2, 1, 3, HEADS, 16), torch.randn(2, 1, 3, HEADS)
    assert_memory_is_checked(
        "flash_attn_combine: out",
        torch.zeros(1, 3, HEADS, 16, dtype=torch.bfloat16),
        lambda memory: module.flash_attn_combine(out_partial, lse_partial, memory),
    )


def test_packed_of_flash_attention_3() -> None:
    qkv = torch.randn(2, 5, HEADS + 2 * KV_HEADS, 16)
    out = flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=HEADS)
    tensors = qkv.tensor_split((HEADS, HEADS + KV_HEADS), 2)
    assert_same_bits(out, flash_attn.flash_attn_func(*tensors, causal=True))
    qkv = qkv[:, :, :6].unflatten(2, (3, 2))
    out = flash_attn_interface.flash_attn_qkvpacked_func(qkv)
    assert_same_bits(out, flash_attn.flash_attn_func(*qkv.unbind(2)))
    with pytest.raises(ValueError, match=r"^flash_attn_qkvpacked_func: qkv: expected 3 groups of heads"):
        flash_attn_interface.flash_attn_qkvpacked_func(qkv.flatten(2, 3), num_heads_q=3)


def test_flash_attention_4_returns_pairs() -> None:
    """(out, lse), with None for an lse that was not asked for; batches as tensors of four dimensions."""
    q, k, v = (rows([n] * 2, heads) for n, heads in ((3, HEADS), (5, KV_HEADS), (5, KV_HEADS)))
    stacked = [torch.stack(tensors) for tensors in (q, k, v)]
    expected, expected_lse = attend_all(q, k, v, window=(2, -1))
    lse_of_equal = expected_lse.view(2, 3, HEADS).transpose(1, 2)
    out, lse = cute.flash_attn_func(*stacked, window_size=(2, None), return_lse=True)
    assert_close_to_reference(out, expected.view(out.shape))
    assert_close_to_reference(lse, lse_of_equal)
    assert cute.flash_attn_func(*stacked)[1] is None
    out, lse = cute.flash_attn_varlen_func(*stacked, window_size=(2, None), return_lse=True)
    assert_close_to_reference(out, expected.view(out.shape))
    assert_close_to_reference(lse, lse_of_equal)
    out, lse = cute.flash_attn_varlen_func(
        *map(torch.cat, (q, k, v)), None, starts([3, 3]), starts([5, 5]), window_size=(2, None), return_lse=True
    )
    assert_close_to_reference(out, expected)
    assert_close_to_reference(lse, expected_lse.T)
    used = torch.tensor([4, 2], dtype=torch.int32)
    out, _ = cute.flash_attn_varlen_func(*stacked, seqused_k=used, page_table=torch.tensor([[1], [0]]), causal=True)
    some = [[tensors[s][:n] for s, n in ((1, 4), (0, 2))] for tensors in (k, v)]
    assert_close_to_reference(out.flatten(0, 1), attend_all(q, *some, causal=True)[0])


def test_windows_of_flash_attention_4() -> None:
    """Two sides whose sum is negative are no window. A negative side alone would shift the window away from the row."""
    q, k, v = torch.randn(1, 3, HEADS, 16), *torch.randn(2, 1, 5, KV_HEADS, 16)
    assert_same_bits(cute.flash_attn_func(q, k, v, window_size=(-1, -1))[0], cute.flash_attn_func(q, k, v)[0])
    with pytest.raises(ValueError, match=r"^flash_attn_func: window_size: expected None, or 0 or more"):
        cute.flash_attn_func(q, k, v, window_size=(-1, 3))
    with pytest.raises(ValueError, match=r"^flash_attn_func: mask_mod: expected None"):
        cute.flash_attn_func(q, k, v, mask_mod=lambda *_: True)


def test_fork_of_vllm() -> None:
    """max_seqlen_q stands before cu_seqlens_q; the result goes into `out`."""
    q, k, v = (rows(lengths, heads) for lengths, heads in (([3, 1], HEADS), ([5, 4], KV_HEADS), ([5, 4], KV_HEADS)))
    tensors = [torch.cat(each) for each in (q, k, v)]
    out = torch.empty_like(tensors[0])
    result, lse = vllm_flash_attn.flash_attn_varlen_func(
        *tensors, 3, starts([3, 1]), 5, starts([5, 4]), causal=True, window_size=[2, 0], out=out, fa_version=3,
        return_softmax_lse=True,
    )  # fmt: skip
    expected = attend_all(q, k, v, causal=True, window=(2, 0))
    assert result is out
    assert_close_to_reference(out, expected[0])
    assert_close_to_reference(lse, expected[1].T)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: cp_world_size: expected 1, got 2"):
        vllm_flash_attn.flash_attn_varlen_func(*tensors, 3, starts([3, 1]), 5, starts([5, 4]), cp_world_size=2)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: gather_kv_indices: expected None, got a tensor"):
        gathered = {"gather_kv_indices": starts([3]), "gather_kv_valid_length": starts([3])}
        vllm_flash_attn.flash_attn_varlen_func(*tensors, 3, starts([3, 1]), 5, starts([5, 4]), **gathered)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: window_size: expected \(left, right\), got \[5\]$"):
        vllm_flash_attn.flash_attn_varlen_func(*tensors, 3, starts([3, 1]), 5, starts([5, 4]), window_size=[5])


# ---- what libraries import first -------------------------------------------------------------------------------------


def test_names_of_flash_attn() -> None:
    """The recipe of docs/adopt.md: a library finds all modules under flash-attn's names."""
    program = """
        import sys, pagedattn_ext.flash_attn, pagedattn_ext.flash_attn_interface, pagedattn_ext.vllm_flash_attn

        sys.modules["flash_attn"] = pagedattn_ext.flash_attn
        sys.modules["flash_attn_interface"] = pagedattn_ext.flash_attn_interface
        sys.modules["vllm.vllm_flash_attn"] = pagedattn_ext.vllm_flash_attn

        import flash_attn
        from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_kvpacked_func
        from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
        from flash_attn.cute import flash_attn_func as of_4
        from flash_attn.cute.interface import flash_attn_varlen_func as varlen_of_4
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func
        from flash_attn.ops.activations import swiglu
        from flash_attn.ops.rms_norm import RMSNorm, rms_norm
        from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
        from flash_attn.ops.triton.rotary import apply_rotary
        from flash_attn_interface import flash_attn_func as of_3, get_scheduler_metadata

        assert flash_attn.__version__.startswith("2.8")
        assert flash_attn_func is pagedattn_ext.flash_attn.flash_attn_func
        assert of_3 is not flash_attn_func
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_names_of_vllms_fork() -> None:
    """The forms in which vLLM 0.33 imports from its fork. `cute`, which is left out, raises what vLLM catches."""
    program = """
        import sys, types, pagedattn_ext.vllm_flash_attn

        sys.modules["vllm"] = types.ModuleType("vllm")
        sys.modules["vllm.vllm_flash_attn"] = pagedattn_ext.vllm_flash_attn

        from vllm.vllm_flash_attn import (
            compile_flash_attn_varlen_func_from_specs, flash_attn_varlen_func, get_scheduler_metadata,
            is_fa_version_supported,
        )
        from vllm.vllm_flash_attn import FA2_AVAILABLE, FA3_AVAILABLE, flash_attn_interface
        from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason, flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported as _is_fa_version_supported
        from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb

        assert FA2_AVAILABLE and FA3_AVAILABLE and flash_attn_interface.FA2_AVAILABLE
        assert flash_attn_interface.is_fa_version_supported(4) and _is_fa_version_supported(3)
        compile_flash_attn_varlen_func_from_specs(q_shape=(1, 2, 64), causal=True, fa_version=4)
        try:
            from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd
        except ImportError:
            pass
        else:
            raise AssertionError("cute")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_what_vllm_asks_of_its_fork() -> None:
    """Any version that its function takes, and a plan without contents."""
    assert [vllm_flash_attn.is_fa_version_supported(version) for version in (1, 2, 3, 4)] == [False, True, True, True]
    assert vllm_flash_attn.is_fa_version_supported(2, torch.device("cuda"))
    assert vllm_flash_attn.fa_version_unsupported_reason(2, device=torch.device("cuda")) is None
    assert "got 1" in str(vllm_flash_attn.fa_version_unsupported_reason(1))
    plan = vllm_flash_attn.get_scheduler_metadata(2, 1, 5, 4, 2, 64, torch.tensor([3, 5], dtype=torch.int32))
    assert plan.numel() == 0
