"""Map key names of other frameworks to the keys here, so that an error about an unknown key can name the right one.

    key_called("learning_rate")        # "optimizer.lr"

The names are those of TorchTitan, transformers' Trainer and config.json, Megatron-LM, nanoGPT and LitGPT. A name that is already
a key of some section needs no row. Standard library only.
"""

_CALLED = {  # the key here -> its names elsewhere
    "job.dump_folder": "output_dir out_dir save_dir",
    "job.description": "run_name experiment_name wandb_run_name",
    "model.flavor": "model_name model_size model_name_or_path",
    "model.dim": "hidden_size n_embd d_model",
    "model.n_layers": "num_layers num_hidden_layers n_layer",
    "model.n_heads": "num_attention_heads n_head",
    "model.n_kv_heads": "num_key_value_heads num_query_groups n_query_groups",
    "model.hidden_dim": "ffn_hidden_size intermediate_size",
    "model.vocab_size": "padded_vocab_size",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings",
    "model.rope_theta": "rotary_base rope_base",
    "model.norm_eps": "norm_epsilon rms_norm_eps",
    "model.max_seq_len": "max_position_embeddings",
    "model.tokenizer_path": "tokenizer tokenizer_model hf_assets_path",
    "training.local_batch_size": "batch_size micro_batch_size per_device_train_batch_size train_batch_size",
    "training.global_batch_size": "gradient_accumulation_steps",
    "training.seq_len": "seq_length sequence_length max_seq_length block_size context_length",
    "training.max_norm": "clip_grad grad_clip max_grad_norm gradient_clip_val",
    "training.steps": "max_steps max_iters train_iters num_steps num_train_steps",
    "training.mixed_precision_param": "bf16 precision",
    "training.offload": "enable_cpu_offload cpu_offload fsdp_cpu_offload optimizer_cpu_offload offload_optimizer offload_params",
    "training.loss_chunk_tokens": "use_liger_kernel chunked_cross_entropy loss_chunk_size num_output_chunks",
    "optimizer.name": "optim optimizer_type",
    "optimizer.lr": "learning_rate max_lr",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.momentum": "muon_momentum",
    "optimizer.ns_steps": "muon_num_ns_steps",
    "optimizer.state_dtype": "exp_avg_dtype exp_avg_sq_dtype optim_bits",
    "lr_scheduler.warmup_steps": "warmup warmup_iters lr_warmup_iters lr_warmup_steps",
    "lr_scheduler.total_steps": "lr_decay_iters",
    "lr_scheduler.decay_type": "lr_decay_style lr_scheduler_type",
    "lr_scheduler.min_lr_factor": "min_lr lr_min",
    "parallelism.tensor_parallel_degree": "tensor_model_parallel_size tp",
    "parallelism.pipeline_parallel_degree": "pipeline_model_parallel_size pp",
    "parallelism.context_parallel_degree": "context_parallel_size cp",
    "parallelism.replicate_compression": "powersgd ddp_comm_hook gradient_compression",
    "parallelism.replicate_rank": "matrix_approximation_rank powersgd_rank",
    "parallelism.replicate_uncompressed_steps": "start_powersgd_iter",
    "parallelism.enable_async_tensor_parallel": "tp_comm_overlap",
    "activation_checkpoint.mode": "gradient_checkpointing recompute_granularity recompute_activations",
    "compile.enable": "torch_compile compile",
    "float8.enable": "fp8 fp8_format converters enable_float8_linear",
    "float8.recipe": "recipe_name fp8_recipe",
    "float8.all_gather": "enable_fsdp_float8_all_gather fp8_param_gather",
    "checkpoint.enable": "enable_checkpoint resume_from_checkpoint",
    "checkpoint.interval": "save_steps save_interval save_every ckpt_interval",
    "checkpoint.keep_latest_k": "save_total_limit",
    "data.path": "data_path dataset_path data_dir train_file",
    "data.num_workers": "dataloader_num_workers",
    "validation.freq": "eval_steps eval_interval val_interval",
    "validation.steps": "eval_iters val_iters",
    "metrics.log_freq": "logging_steps log_interval log_every",
    "metrics.enable_wandb": "wandb use_wandb wandb_log report_to",
    "debug.seed": "random_seed data_seed",
}
_KEYS = {name: key for key, names in _CALLED.items() for name in names.split()}


def key_called(name: str) -> str:
    """Return the key here as "section.name", or "" if there is none."""
    return _KEYS.get(name.lower().replace("-", "_"), "")
