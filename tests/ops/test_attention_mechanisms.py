"""PAGEDATTN_CUDA_WITHOUT: what GPUs of sm_90 have beside those of sm_80 can be left out, one by one, and the results
stay what they are. On the simt device, which counts what kernels use; bits are compared on a GPU as well.
"""

import pytest
import torch
from attention_cases import OPS, Case, assert_attention, make_arguments
from checks import assert_same_bits
from op_table import simt_uses

pytestmark = pytest.mark.devices("simt", "cuda")

SWITCH = "PAGEDATTN_CUDA_WITHOUT"
# The mechanism that a word leaves out, and with `bulk` the one that needs it.
LEFT_OUT = {
    "wgmma": {"wgmma"},
    "cluster": {"clusters"},
    "bulk": {"bulk_copies", "clusters"},
    "pdl": {"dependent_launches"},
    "bulk,wgmma": {"bulk_copies", "clusters", "wgmma"},
}
# Prefill of so few tiles that its tokens are split, and merged by a kernel that begins early; decode of few sequences,
# which takes clusters, and of many.
BATCHES = {
    "small": Case(((1, 1300), (40, 600), (1, 20)), torch.bfloat16, group_size=4),
    "large": Case(((1, 1300), (40, 600), *[(1, 3)] * 30), torch.bfloat16, group_size=4),
}


def run(arguments: dict) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """out, lse and what the kernels have used."""
    before = simt_uses() if OPS.namespace == "pagedattn_simt" else {}
    out, lse = OPS.paged_attention(**arguments)
    after = simt_uses() if OPS.namespace == "pagedattn_simt" else {}
    return out, lse, {name for name in before if after[name] > before[name]} - {"questions"}


@pytest.mark.parametrize("batch", BATCHES)
def test_results_without_a_mechanism(device, monkeypatch, batch):
    monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", "132")
    arguments = make_arguments(BATCHES[batch], device)
    out, lse, used = run(arguments)
    assert_attention(arguments, out, lse)
    if OPS.namespace == "pagedattn_simt":
        assert used == {"wgmma", "bulk_copies", "dependent_launches", *({"clusters"} if batch == "small" else ())}
    decode = torch.tensor([rows == 1 for rows, _ in BATCHES[batch].lens for _ in range(rows)], device=device)
    for word, left_out in LEFT_OUT.items():
        monkeypatch.setenv(SWITCH, word)
        other_out, other_lse, other_used = run(arguments)
        assert other_used == used - left_out
        assert_attention(arguments, other_out, other_lse)
        same = decode if "wgmma" in left_out else slice(None)
        assert_same_bits(other_out[same], out[same])
        assert_same_bits(other_lse[same], lse[same])


def test_switch_is_looked_up_at_each_call_and_checked(device, monkeypatch):
    arguments = make_arguments(Case(((1, 20),), torch.float16), device)
    for wrong in ("wgmma,clusters", "WGMMA", "wgmma,", ",", "bulk pdl"):
        monkeypatch.setenv(SWITCH, wrong)
        with pytest.raises(RuntimeError, match=rf"^{SWITCH}: expected wgmma, cluster, bulk or pdl, .* in '{wrong}'"):
            OPS.paged_attention(**arguments)
    monkeypatch.setenv(SWITCH, "")
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.devices("simt")
def test_each_gpu_is_asked_once(device, monkeypatch):
    """About its size and the kernels: a call after the first asks nothing, and another GPU is asked for itself."""
    arguments = make_arguments(BATCHES["large"], device)
    num_questions = []
    for num_multiprocessors in ("131", "131", "133", "131", "133"):  # which no other test has
        monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", num_multiprocessors)
        before = simt_uses()["questions"]
        OPS.paged_attention(**arguments)
        num_questions.append(simt_uses()["questions"] - before)
    assert num_questions == [num_questions[0], 0, num_questions[0], 0, 0]
    assert num_questions[0] > 0
