"""concat_and_cache_mla: the latent and the rotary part of a token side by side in its slot, bit for bit."""

import pytest
import torch
from checks import DTYPES, assert_rejected, assert_row_gap_untouched, assert_same_bits, random_bits, with_row_gap
from op_table import OPS


def make_arguments(device: torch.device, dtype: torch.dtype, slots: list[int], sizes: tuple[int, int]) -> dict:
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return with_row_gap(random_bits(*shape, dtype=dtype, generator=generator).to(device), 3)

    cache = random_bits(4, 5, sum(sizes), dtype=dtype, generator=generator).to(device)
    return {
        "kv_c": rows(len(slots), sizes[0]),
        "k_pe": rows(len(slots), sizes[1]),
        "kv_cache": with_row_gap(cache, 2, 2),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
    }


@pytest.mark.parametrize("sizes", [(512, 64), (17, 3), (8, 0)], ids=str)
@pytest.mark.parametrize("slots", [[], [-1], [19, 0, -1, 7, 8, 9]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_concat_and_cache_mla(device, dtype, slots, sizes):
    arguments = make_arguments(device, dtype, slots, sizes)
    expected = arguments["kv_cache"].clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 5, slot % 5] = torch.cat([arguments["kv_c"][token], arguments["k_pe"][token]])
    OPS.concat_and_cache_mla(**arguments)
    assert_same_bits(arguments["kv_cache"], expected)
    assert_row_gap_untouched(arguments["kv_cache"])


def test_tokens_of_padding_have_no_slot(device):
    arguments = make_arguments(device, torch.float32, [3, 4, 5], (8, 4))
    few = make_arguments(device, torch.float32, [3, 4, 5], (8, 4))
    few["slot_mapping"] = few["slot_mapping"][:2].int()
    arguments["slot_mapping"][2] = -1
    for each in (arguments, few):
        OPS.concat_and_cache_mla(**each)
    assert_same_bits(arguments["kv_cache"], few["kv_cache"])


ERRORS = {
    "kv_cache dtype": ("kv_cache", TypeError, lambda a: {"kv_cache": a["kv_cache"].double()}),
    "kv_cache rank": ("kv_cache", ValueError, lambda a: {"kv_cache": a["kv_cache"][0]}),
    "kv_cache size": ("kv_cache", ValueError, lambda a: {"kv_cache": a["kv_cache"][..., :11]}),
    "kv_cache overlaps": ("kv_cache", ValueError, lambda a: {"kv_cache": a["kv_cache"][:1].expand(4, -1, -1)}),
    "no slots": ("kv_cache", ValueError, lambda a: {"kv_cache": a["kv_cache"][:, :0]}),
    "kv_c dtype": ("kv_c", TypeError, lambda a: {"kv_c": a["kv_c"].half()}),
    "kv_c strides": ("kv_c", ValueError, lambda a: {"kv_c": a["kv_c"].T.contiguous().T}),
    "too few tokens": ("k_pe", ValueError, lambda a: {"k_pe": a["k_pe"][:2]}),
    "k_pe rank": ("k_pe", ValueError, lambda a: {"k_pe": a["k_pe"][:, None]}),
    "slot_mapping dtype": ("slot_mapping", TypeError, lambda a: {"slot_mapping": a["slot_mapping"].float()}),
    "a slot past the end": ("slot_mapping", ValueError, lambda a: {"slot_mapping": torch.tensor([3, 20, 5])}),
}


@pytest.mark.parametrize("what", ERRORS)
def test_concat_and_cache_mla_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = make_arguments(device, torch.float32, [3, 4, 5], (8, 4))
    assert_rejected("concat_and_cache_mla", arguments | change(arguments), argument, error)
