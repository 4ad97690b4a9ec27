"""The engine that the options of a command ask for."""

import argparse

from pagedattn_serve.engine import LLMEngine


def make_engine(args: argparse.Namespace) -> LLMEngine:
    """args: with the options of `cli.options`. Raises what `LLMEngine` does."""
    return LLMEngine(
        args.model,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        device=args.device,
        block_size=args.block_size,
        kv_cache_memory=args.kv_cache_memory,
        num_blocks=args.num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        swap_space=args.swap_space,
        gpu_memory_utilization=args.gpu_memory_utilization,
        preemption_mode=args.preemption_mode,
        enable_prefix_caching=args.enable_prefix_caching,
        scheduling_policy=args.scheduling_policy,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_scales=args.kv_scales,
        speculation=args.speculation,
        quantization=args.quantization,
        max_beam_width=args.max_beam_width,
    )
