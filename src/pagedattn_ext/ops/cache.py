"""Writing to the paged cache, reading back, copying whole blocks."""

import torch
from torch import Tensor

from ._call import NAMESPACE, call, check_one_device, check_tensors, given


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes the keys and values of new tokens into their slots of the cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size], any stride in dimension 0.
        key_cache, value_cache: see the module; updated.
        slot_mapping: int64 or int32 [num_tokens], block * block_size + offset; a token with a negative slot is skipped.
        kv_cache_dtype, k_scale, v_scale: for fp8 caches, see the module.
    """
    is_plain = kv_cache_dtype == "auto" and k_scale is None and v_scale is None
    options = () if is_plain else (kv_cache_dtype, k_scale, v_scale)  # defaults, too, take torch's time
    call("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping, *options)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`reshape_and_cache` for caches of [num_blocks, block_size, num_kv_heads, head_size] alone, as vLLM calls it.

    key and value may have more tokens than slot_mapping, as padded batches do: the tokens at the end are left out.
    """
    call("reshape_and_cache_flash", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the latents and the rotary parts of new tokens side by side into their slots, for `mla_attention`.

    Args:
        kv_c: [num_tokens, latent_size], any stride in dimension 0.
        k_pe: [num_tokens, rope_size], rotated, any stride in dimension 0.
        kv_cache: [num_blocks, block_size, latent_size + rope_size] of the same dtype, fp32, fp16 or bf16; the last
            dimension contiguous, any other strides; updated.
        slot_mapping: int64 or int32 [num_slots], at most num_tokens; the tokens behind have no slot. A negative slot is
            padding, which is skipped.
    """
    call("concat_and_cache_mla", kv_c, k_pe, kv_cache, slot_mapping)


def gather_cached_kv(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values in these slots: the inverse of `reshape_and_cache`.

    Args:
        key_cache, value_cache: see the module; not fp8.
        slot_mapping: int64 or int32 [num_tokens]. The rows of negative slots are zeros (the raw op leaves them as they
            are).

    Returns:
        (key, value), [num_tokens, num_kv_heads, head_size] each.
    """
    check_tensors("gather_cached_kv", key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    heads = value_cache.shape[2:4] if key_cache.dim() == 4 else value_cache.shape[1:3]
    key = value_cache.new_zeros((*slot_mapping.shape, *heads))
    value = torch.zeros_like(key)  # not halves of one tensor: torch.compile may lose where the second half begins
    call("gather_cached_kv", key, value, key_cache, value_cache, slot_mapping)
    return key, value


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks within the caches of every layer (the copy of copy-on-write).

    Args:
        key_caches, value_caches: one cache a layer, [num_blocks, ...], the last dimension contiguous, any other
            strides; updated.
        block_mapping: int64 [num_pairs, 2], (source, target). A source may occur several times, a target once; no block
            may be both.
    """
    call("copy_blocks", key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks of one pool to blocks of another, which may be on another device.

    Between a GPU and pinned host memory the copy is asynchronous, on the current stream: keep both pools, and leave the
    host's alone, until the stream is done. Memory that is not pinned is copied run by run of adjacent blocks.

    Args:
        src: [num_src_blocks, ...], the last dimension contiguous, any other strides.
        dst: [num_dst_blocks, ...], blocks shaped like those of src, of strides of their own; updated.
        block_mapping: int64 [num_pairs, 2], (block of src, block of dst), every block of dst at most once.
    """
    call("swap_blocks", src, dst, block_mapping)


def batch_positions(start_loc: Tensor | None, first_positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each token of a ragged batch.

    The tokens start_loc[s] to start_loc[s + 1] are of sequence s, and token start_loc[s] + i stands at position
    first_positions[s] + i. Behind the tokens of all sequences may be padding, which has sequence -1 and position 0.

    Args:
        start_loc: int32 or int64 [num_seqs + 1], from 0 to at most num_tokens; None if all sequences have equally many
            tokens, and there is no padding.
        first_positions: int32 or int64 [num_seqs].
        num_tokens: of the batch, padding included.

    Returns:
        (batch_indices, positions), int64 [num_tokens] each.
    """
    return call("batch_positions", start_loc, first_positions, num_tokens)


def compute_slot_mapping(
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
    num_blocks: int,
    *,
    batch_indices: Tensor | None = None,
    block_start_loc: Tensor | None = None,
    last_block_lens: Tensor | None = None,
) -> Tensor:
    """The slots of tokens, for `reshape_and_cache`: block * block_size + offset.

    A token must lie in the blocks of its own sequence, and these blocks in the cache.

    Args:
        positions: int32 or int64 [num_tokens], of each token in its sequence.
        block_tables: int32 or int64 [num_seqs, max_num_blocks_per_seq]; with block_start_loc the blocks of all
            sequences, one after the other [at least block_start_loc[-1]].
        block_size, num_blocks: of the cache.
        batch_indices: int32 or int64 [num_tokens], the sequence of each token; a token with a negative one is skipped.
            Default: token i is of sequence i.
        block_start_loc: int32 or int64 [num_seqs + 1], where the blocks of each sequence begin.
        last_block_lens: int32 or int64 [num_seqs], tokens in the last block of each sequence. They are checked (1 to
            block_size, if the sequence has blocks), and do not change the result.

    Returns:
        slot_mapping, int64 [num_tokens]; -1 for tokens that are skipped.
    """
    optional = {
        "batch_indices": batch_indices, "block_start_loc": block_start_loc, "last_block_lens": last_block_lens,
    }  # fmt: skip
    return call("compute_slot_mapping", positions, block_tables, block_size, num_blocks, **given(optional))


def consecutive_block_tables(
    first_blocks: Tensor,
    end_blocks: Tensor,
    seq_lens: Tensor,
    max_num_blocks_per_seq: int,
    num_blocks: int,
    *,
    left_padding: Tensor | None = None,
) -> Tensor:
    """Block tables of sequences whose tokens lie one after the other, each token a block.

    block_tables[s, i] = first_blocks[s] + left_padding[s] + i. A sequence must not leave its own tokens, which end
    before end_blocks[s].

    Args:
        first_blocks, end_blocks: int32 or int64 [num_seqs], a sequence's first token, and the one behind its last.
        seq_lens: int32 or int64 [num_seqs], tokens in use, the padding included; at most end_blocks - first_blocks.
        max_num_blocks_per_seq: the width of the result; at least the longest sequence without its padding.
        num_blocks: of the cache.
        left_padding: int32 or int64 [num_seqs], tokens to skip at the start of each sequence.

    Returns:
        block_tables, int32 [num_seqs, max_num_blocks_per_seq]. Entries behind a sequence's tokens may be any others.
    """
    return call(
        "consecutive_block_tables", first_blocks, end_blocks, seq_lens, max_num_blocks_per_seq, num_blocks,
        left_padding=left_padding,
    )  # fmt: skip


@torch.library.register_fake(f"{NAMESPACE}::batch_positions")
def _(start_loc: Tensor | None, first_positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    check_one_device("batch_positions", start_loc, first_positions)
    positions = first_positions.new_empty(num_tokens, dtype=torch.int64)
    return torch.empty_like(positions), positions


@torch.library.register_fake(f"{NAMESPACE}::compute_slot_mapping")
def _(positions: Tensor, block_tables: Tensor, block_size: int, num_blocks: int, **optional: Tensor | None) -> Tensor:
    check_one_device("compute_slot_mapping", positions, block_tables, *optional.values())
    return positions.new_empty(positions.shape, dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::consecutive_block_tables")
def _(
    first_blocks: Tensor,
    end_blocks: Tensor,
    seq_lens: Tensor,
    max_num_blocks_per_seq: int,
    num_blocks: int,
    left_padding: Tensor | None = None,
) -> Tensor:
    check_one_device("consecutive_block_tables", first_blocks, end_blocks, seq_lens, left_padding)
    return seq_lens.new_empty(seq_lens.shape[0], max_num_blocks_per_seq, dtype=torch.int32)
