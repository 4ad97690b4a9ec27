"""A bool is no scale in FlashInfer's functions either, where a scale is multiplied with others before an op sees it."""

from typing import Any

import pytest
import torch
from brute_force import starts

from pagedattn_ext import flashinfer

Q, K = torch.randn(3, 4, 16), torch.randn(5, 2, 16)
OF_PLAN = ("sm_scale", "logits_soft_cap", "rope_scale", "rope_theta")
OF_RUN = ("q_scale", "k_scale", "v_scale")


@pytest.mark.parametrize("scale", [True, torch.tensor(True)], ids=str)
@pytest.mark.parametrize("name", [*OF_PLAN, *OF_RUN])
def test_a_bool_is_no_scale(name: str, scale: Any) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    pages = torch.randn(4, 2, 8, 2, 16)
    plan, run = ({name: scale}, {}) if name in OF_PLAN else ({}, {name: scale})
    lists = starts([1, 2]), torch.tensor([3, 0, 1], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    with pytest.raises(TypeError, match=rf"^BatchDecodeWithPagedKVCacheWrapper\.\w+: {name}: expected (a )?number"):
        wrapper.plan(*lists, 4, 2, 16, 8, **plan)
        wrapper.run(Q[:2], pages, **run)


@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
def test_a_bool_is_no_scale_of_a_rotation(name: str) -> None:
    """Even if the number that it equals was taken before."""
    apply, positions = flashinfer.apply_rope_pos_ids, torch.arange(3)
    apply(Q, Q, positions, **{name: 1})
    with pytest.raises(TypeError, match=rf"^apply_rope_pos_ids: {name}: expected a number, got True"):
        apply(Q, Q, positions, **{name: True})


@pytest.mark.parametrize("name", OF_PLAN)
def test_a_bool_is_no_scale_of_one_sequence(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^single_prefill_with_kv_cache: {name}: expected a number, got True"):
        flashinfer.single_prefill_with_kv_cache(Q, K, K, **{name: True})
