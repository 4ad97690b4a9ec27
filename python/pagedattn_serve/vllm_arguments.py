"""The arguments of vLLM 0.33 that are no arguments here: which values mean what happens here anyway, and what to do
about any other value. docs/from-vllm.md has tables of this data.

`takes_arguments_of_vllm` lets a dataclass take the arguments. A function takes them as `**of_vllm` and calls `refuse`.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from reprlib import repr as short_repr
from typing import Any, NamedTuple, TypeVar

from pagedattn_serve.errors import ArgumentError, shown

T = TypeVar("T")


class Argument(NamedTuple):
    """values: those that mean what happens here anyway, as do None and empty values; None: all values do, because the
    argument has a say only in what is not here. instead: what to do; or, if all values may be given, what the argument
    is about."""

    values: tuple[Any, ...] | None
    instead: str


def _group(instead: str, /, **values: tuple[Any, ...]) -> dict[str, Argument]:
    """Arguments with the same advice."""
    return {name: Argument(each, instead) for name, each in values.items()}


def _any(about: str, names: str) -> dict[str, Argument]:
    """Arguments that may have any value."""
    return {name: Argument(None, about) for name in names.split()}


_LORA = "merge the adapter into the checkpoint"
_MEDIA = "leave it out: models here take text alone"
_LOGS = "read LLMEngine.stats(), or the server's /metrics"

ENGINE_ARGUMENTS = {
    # the checkpoint
    **_group(
        "give a model that generates text, or call LLM.embed",
        runner=("auto", "generate", "pooling"),
        convert=("auto", "none", "embed"),
        pooler_config=(),
        diffusion_config=(),
        task=("auto", "generate", "embed", "score"),  # of an earlier vLLM
    ),
    **_group("give the directory as model", model_weights=(), hf_config_path=(), download_dir=()),
    **_group(
        "download the revision, and give its directory as model",
        revision=("main",),
        code_revision=("main",),
        tokenizer_revision=("main",),
        hf_token=(False,),
    ),
    **_group(
        "change the checkpoint's config.json", hf_overrides=(), model_class_overrides=(), config_format=("auto", "hf")
    ),
    **_group(
        "leave it out: a checkpoint is safetensors or pytorch_model.bin",
        model_loader_extra_config=(),
        ignore_patterns=(["original/**/*"],),
    ),
    **_any(
        "how weights are read",
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load "
        "pt_load_map_location max_parallel_loading_workers",
    ),
    **_group("leave it out: the architecture in config.json chooses the implementation", model_impl=("auto",)),
    **_any("a name for clients; the server takes --served-model-name", "served_model_name"),
    **_group("leave it out: transformers chooses the tokenizer", tokenizer_mode=("auto", "hf")),
    **_group("give prompts as token ids, and SamplingParams(detokenize=False)", skip_tokenizer_init=(False,)),
    **_group("give prompts as texts or token ids", enable_prompt_embeds=(False,)),
    **_group("give it to LLM.chat", chat_template=()),
    **_group("leave it out: a checkpoint says itself how it is quantized", quantization_config=()),
    **_any("formats that vLLM wants to drop", "allow_deprecated_quantization"),
    # sampling
    **_group(
        "give SamplingParams with each prompt",
        generation_config=("auto",),
        override_generation_config=(),
        logits_processors=(),
    ),
    **_group("ask for at most 20 logprobs", max_logprobs=(20,)),
    **_group("leave it out: logprobs are of the logits before all changes", logprobs_mode=("raw_logprobs",)),
    **_group(
        "give a form with each request (StructuredOutput)",
        structured_outputs_config=({"backend": "auto"}, {"backend": "guidance"}),
        guided_decoding_backend=("auto", "guidance"),  # of an earlier vLLM
    ),
    **_group("give it to LLM.chat and LLM.parse_chat", reasoning_parser=()),
    **_group(
        "leave it out: the output's text has the reasoning in it",
        reasoning_parser_plugin=(),
        reasoning_config=(),
    ),
    **_group("leave it out: only speculation by n-grams is here", spec_model=()),
    # scheduler and cache
    **_group(
        "leave it out: docs/serving.md says what the scheduler does",
        enable_chunked_prefill=(True,),
        long_prefill_token_threshold=(0,),
        long_prefill_token_threshold_adaptive=(False,),
        max_num_scheduled_tokens=(),
        max_num_active_seqs=(),
        scheduler_cls=(),
        scheduler_reserve_full_isl=(True,),
        prefill_schedule_interval=(1,),
        async_scheduling=(False,),
        stream_interval=(1,),
        watermark=(0,),
        num_scheduler_steps=(1,),  # of an earlier vLLM
    ),
    **_group("give max_waiting to AsyncLLMEngine", max_num_queued_reqs=(), max_num_queued_tokens=()),
    **_group(
        "leave it out: all layers share one kind of cache",
        kv_cache_dtype_skip_layers=(),
        disable_sliding_window=(False,),
        kv_sharing_fast_prefill=(False,),
        prefix_cache_retention_interval=(0,),
        prefix_match_unit=(),
    ),
    **_any(
        "how vLLM keeps blocks",
        "prefix_caching_hash_algo disable_hybrid_kv_cache_manager swa_bounded_replay use_v2_block_manager",
    ),
    **_group("give swap_space, for requests that are swapped out", kv_offloading_size=(0,)),
    **_group(
        "leave it out: a cache stays in its engine",
        kv_transfer_config=(),
        kv_events_config=(),
        ec_transfer_config=(),
        ec_manager_config=(),
        weight_transfer_config=(),
    ),
    **_group(
        "leave it out: the weights lie where the model runs; quantization makes them smaller",
        cpu_offload_gb=(0,),
        offload_group_size=(0,),
    ),
    **_any(
        "what is offloaded",
        "offload_backend cpu_offload_params offload_num_in_group offload_prefetch_step offload_params "
        "kv_offloading_backend",
    ),
    # processes
    **_group(
        "split the model by tensor_parallel_size or pipeline_parallel_size",
        prefill_context_parallel_size=(1,),
        decode_context_parallel_size=(1,),
        enable_hc_sp=(False,),
    ),
    **_group(
        "give data_parallel_size to AsyncLLMEngine.from_engine_args or `pagedattn serve`",
        data_parallel_size=(1,),
        data_parallel_rank=(0,),
        data_parallel_start_rank=(0,),
        data_parallel_size_local=(1,),
        data_parallel_hybrid_lb=(False,),
        data_parallel_external_lb=(False,),
        data_parallel_multi_port_external_lb=(False,),
    ),
    **_group(
        'start ranks with torchrun, or give distributed_executor_backend="ray"',
        nnodes=(1,),
        node_rank=(0,),
        device_ids=(),
    ),
    **_group(
        "leave it out: the ranks divide the CPUs of the machine",
        numa_bind=(False,),
        numa_bind_nodes=(),
        numa_bind_cpus=(),
    ),
    **_any(
        "how vLLM's processes meet",
        "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend dp_sync_interval disable_nccl_for_dp_synchronization "
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "disable_custom_all_reduce enable_shm_tensor_arena fail_on_environ_validation _api_process_count "
        "_api_process_rank disable_async_output_proc",
    ),
    **_group(
        "leave it out: the engine has workers of its own, and watches them",
        worker_cls=("auto",),
        worker_extension_cls=(),
        shutdown_timeout=(0,),
        ray_workers_use_nsight=(False,),
        fault_tolerance_config=(),
        enable_fault_tolerance=(False,),
        watchdog_config=(),
        tokens_only=(False,),
    ),
    **_group(
        "leave it out: experts are computed in the rank that has the layer",
        enable_expert_parallel=(False,),
        enable_ep_weight_filter=(False,),
        enable_eplb=(False,),
        eplb_config=(),
        enable_elastic_ep=(False,),
        enable_dbo=(False,),
        ubatch_size=(0,),
    ),
    **_any(
        "how experts are placed",
        "expert_placement_strategy all2all_backend elastic_ep_max_dp_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold",
    ),
    # kernels
    **_group(
        "leave it out: the ops choose their kernels by the machine",
        attention_backend=(),
        attention_config=(),
        kernel_config=(),
        ir_op_priority=(),
        moe_backend=("auto",),
        linear_backend=("auto",),
        sparse_indexer_topk_backend=("auto",),
        enable_batch_sharded_sampling=(False,),
        use_fp64_gumbel=(False,),
        monokernel=(False,),
        gdn_prefill_backend=("auto",),
        kda_prefill_backend=("auto",),
        kda_decode_backend=("auto",),
    ),
    **_group("leave it out, or give enforce_eager=True for no graphs", compilation_config=()),
    **_any(
        "how vLLM compiles, and captures CUDA graphs",
        "cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode disable_cascade_attn "
        "enable_flashinfer_autotune jit_monitor_mode jit_monitor_verbose max_seq_len_to_capture",
    ),
    **_group("leave it out: the states of layers need no options", mamba_config=()),
    **_any(
        "Mamba",
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend mamba_ssu_algorithm "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds enable_mamba_shared_prefix_checkpoint "
        "replayssm_buffer_len use_replayssm",
    ),
    # LoRA, pictures and sound
    **_group(_LORA, enable_lora=(False,), default_mm_loras=(), lora_target_modules=()),
    **_any(
        "LoRA",
        "max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype enable_tower_connector_lora "
        "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    ),
    **_group(
        _MEDIA,
        allowed_local_media_path=(),
        allowed_media_domains=(),
        enable_mm_embeds=(False,),
        media_io_kwargs=(),
        mm_processor_kwargs=(),
        mm_encoder_only=(False,),
        io_processor_plugin=(),
    ),
    **_any(
        "pictures and sound",
        "limit_mm_per_prompt language_model_only interleave_mm_strings mm_processor_cache_gb mm_processor_cache_type "
        "mm_processor_device mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input enable_mm_processor_stats "
        "renderer_num_workers",
    ),
    # logs
    **_group(
        _LOGS,
        disable_log_stats=(True,),
        enable_log_requests=(False,),
        disable_log_requests=(True,),  # of an earlier vLLM
        per_request_spec_decode_metrics=("none",),
        kv_cache_metrics=(False,),
        cudagraph_metrics=(False,),
        enable_mfu_metrics=(False,),
        enable_logging_iteration_details=(False,),
        custom_histogram_buckets=(),
        otlp_traces_endpoint=(),
        collect_detailed_traces=(),
    ),
    **_any("what vLLM logs", "aggregate_engine_logging kv_cache_metrics_sample show_hidden_metrics_for_version"),
    **_group("set up Python's logging", logging_config=(), log_level=(), log_config_file=()),
    **_group("run a profiler around the call", profiler_config=(), enable_layerwise_nvtx_tracing=(False,)),
    # what nothing here does
    **_group(
        "make an engine when there is work for it",
        enable_sleep_mode=(False,),
        enable_nccl_comm_suspend=(False,),
    ),
    **_any(
        "sleep", "enable_cumem_allocator sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
    ),
    **_group(
        "leave it out: nothing here does this",
        enable_return_routed_experts=(False,),
        return_sampling_mask=(False,),
        aux_output_config=(),
        enable_trace_replay=(False,),
        watermark_config=(),
        engram_config=(),
        additional_config=(),
    ),
}
# vLLM's names of options that have another name here.
ENGINE_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "spec_method": "speculation",
    "spec_tokens": "num_speculative_tokens",
}
FILE_FORMATS = ("hf", "safetensors", "gguf")  # of load_format, which are found here
# Options that are None by default in vLLM, and not here.
NONE_IS_DEFAULT = (
    *("block_size", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens"),
    "distributed_executor_backend",
)

SAMPLING_ARGUMENTS = {
    **_group("ask for prompt_logprobs", prompt_logprob_token_ids=(), prompt_logprob_start=(0,)),
    **_group("read the logprobs as mappings", flat_logprobs=(False,)),
    **_group("join the tokens' texts yourself (Logprob.decoded_token)", spaces_between_special_tokens=(True,)),
    **_group("leave it out: each step has an output", stream_interval=(1,), output_text_buffer_length=(0,)),
    **_group("shorten the prompt's token ids", truncate_prompt_tokens=(-1,)),  # of an earlier vLLM
    **_group("give a cache_salt that no other request has", skip_reading_prefix_cache=(False,)),
    **_group("give a function in logits_processors", extra_args=(), repetition_detection=()),
    **_group("give it to LLM.chat", thinking_token_budget=()),
    **_group(
        "leave it out: nothing here does this",
        watermarking=(False,),
        routed_experts_prompt_start=(0,),
        trace_decode_token_ids=(),
    ),
    **_any("how parameters are copied", "skip_clone"),
}
SAMPLING_NAMES = {"structured_outputs": "structured_output", "guided_decoding": "structured_output"}

FORM_ARGUMENTS = {
    **_group('write "additionalProperties": false into the schema', disable_additional_properties=(False,)),
    **_group("leave it out: llguidance compiles each form", backend=("auto", "guidance")),  # of an earlier vLLM
    **_any("backends", "disable_fallback"),
}

PROMPT_ARGUMENTS = {
    **_group(_MEDIA, multi_modal_data=(), mm_processor_kwargs=()),
    **_any("pictures, sound, and models that are no decoders", "multi_modal_uuids media_io_kwargs token_type_ids")
    | _any("where the tokens stand in the text", "prompt_token_offsets"),
}
CALL_ARGUMENTS = {
    **_group(_LORA, lora_request=(), prompt_adapter_request=()),
    **_group("tokenize the prompt yourself, and give its token ids", tokenization_kwargs=()),
    **_group(_MEDIA, mm_processor_kwargs=()),
    **_group("give SamplingParams(structured_outputs=...)", guided_options_request=()),  # of an earlier vLLM
}
CHAT_ARGUMENTS = {
    **CALL_ARGUMENTS,
    **_any("the form of a message, which follows from the template", "chat_template_content_format"),
}
POOLING_ARGUMENTS = {
    **_group(_LORA, lora_request=()),
    **_group("tokenize the prompt yourself, and give its token ids", tokenization_kwargs=()),
    **_group("write the prompt yourself", chat_template=()),
}
BEAM_SEARCH_ARGUMENTS = {
    **_group(_LORA, lora_request=()),
    **_any("how many beams run at once, which the scheduler says", "concurrency_limit"),
}
ASYNC_ENGINE_ARGUMENTS = {
    **_group("leave it out: the engine starts with the first request, or by start()", start_engine_loop=(True,)),
    **_group(_LOGS, stat_loggers=()),
    **_any("vLLM's statistics of use", "usage_context"),
}
ASYNC_CALL_ARGUMENTS = {
    **CALL_ARGUMENTS,
    **_group('give {"prompt": text, "prompt_token_ids": ids} as the prompt', prompt_text=()),
    **_group("leave it out: the router chooses the replica", data_parallel_rank=(0,)),
    **_any("traces, reasoning, and caches beyond the engine's", "trace_headers reasoning_ended reasoning_parser_kwargs")
    | _any("traces, reasoning, and caches beyond the engine's", "session_id kv_hints"),
}


def means_what_happens(argument: Argument, value: object) -> bool:
    """Whether a value may be given."""
    if argument.values is None or value is None:
        return True
    if isinstance(value, str | list | tuple | dict | set):
        return not value or value in argument.values
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in argument.values)


def refuse(arguments: Mapping[str, Any], known: Mapping[str, Argument], function: str) -> None:
    """Raise ValueError, which says what to do, for an argument of vLLM that asks for what is not here. Raise TypeError
    for an argument that vLLM does not have either."""
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        argument = known[name]
        if not means_what_happens(argument, value):
            values = " or ".join(map(repr, argument.values or (None,)))
            raise ArgumentError(name, f"{values} ({argument.instead})", shown(value, short_repr))


def takes_arguments_of_vllm(
    translate: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[[type[T]], type[T]]:
    """Let a dataclass take vLLM's arguments by keyword. translate: makes the dataclass's own arguments of them."""

    def decorate(data: type[T]) -> type[T]:
        own_init = data.__init__

        @wraps(own_init)
        def init(self: T, /, *args: Any, **kwargs: Any) -> None:
            own_init(self, *args, **translate(kwargs))

        data.__init__ = init  # type: ignore[method-assign, assignment]
        return data

    return decorate


def engine_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `EngineArgs`, from those of vLLM's. Raises as `refuse` does."""
    options = _own(arguments, ENGINE_ARGUMENTS, ENGINE_NAMES)
    config = options.pop("speculative_config", None)
    if config:
        options |= _speculation(config)
    for name in NONE_IS_DEFAULT:
        if options.get(name, ...) is None:
            del options[name]
    if isinstance(form := options.get("load_format"), str) and form in FILE_FORMATS:
        del options["load_format"]
    sizes = [options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    backend = options.get("distributed_executor_backend")
    if isinstance(backend, str) and backend == "uni" and sizes == [1, 1]:
        del options["distributed_executor_backend"]
    return options


def sampling_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `SamplingParams`, from those of vLLM's. Raises as `refuse` does."""
    return _own(arguments, SAMPLING_ARGUMENTS, SAMPLING_NAMES)


def form_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `StructuredOutput`, from those of vLLM's. Raises as `refuse` does."""
    own = _own(arguments, FORM_ARGUMENTS, {})
    if own.get("json_object", ...) is None:
        del own["json_object"]
    is_json = own.get("json") is not None or own.get("json_object")
    if own.pop("disable_any_whitespace", False) and is_json:
        own["whitespace_pattern"] = ""
    return own


def _own(arguments: dict[str, Any], known: Mapping[str, Argument], names: Mapping[str, str]) -> dict[str, Any]:
    own = {}
    for name, value in arguments.items():
        if name in known:
            refuse({name: value}, known, "")
        elif name not in names:
            own[name] = value
        elif value is not None:
            if names[name] in arguments:
                raise ArgumentError(name, f"None beside {names[name]}, which says the same")
            own[names[name]] = value
    return own


def _speculation(config: Any) -> dict[str, Any]:
    """The options that a speculative_config means."""
    keys = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
    if not isinstance(config, dict) or config.get("method") != "ngram" or not config.keys() <= keys:
        expected = '{"method": "ngram", "num_speculative_tokens": ...} (only speculation by n-grams is here)'
        raise ArgumentError("speculative_config", expected, shown(config, short_repr))
    options = {"speculation": "ngram"}
    if (number := config.get("num_speculative_tokens")) is not None:
        options["num_speculative_tokens"] = number
    return options
