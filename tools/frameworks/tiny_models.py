"""Tiny models of transformers, whose routers prefer one expert."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

EXPERTS, HOT = 8, 1


def make_model(kind: str, inner: int, **more: Any) -> Any:
    """Return a model with experts of such an inner size; ``more`` is of its configuration."""
    config, own = {
        "qwen3_moe": (
            tf.Qwen3MoeConfig,
            {"moe_intermediate_size": inner, "num_experts": EXPERTS},
        ),
        "gptoss": (
            tf.GptOssConfig,
            {
                "intermediate_size": inner,
                "num_local_experts": EXPERTS,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        "mixtral": (
            tf.MixtralConfig,
            {"intermediate_size": inner, "num_local_experts": EXPERTS},
        ),
        "deepseek_v3": (
            tf.DeepseekV3Config,
            {
                "moe_intermediate_size": inner,
                "n_routed_experts": EXPERTS,
                "n_group": 2,
                "topk_group": 2,
                "n_shared_experts": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
        ),
    }[kind]
    common = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config(**common | own | more), dtype=torch.float32)
    for name, value in model.named_parameters():
        if "experts" in name or "router" in name or "mlp.gate." in name:
            value.data.normal_(0, 0.2)
        if "embed_tokens" in name:
            value.data.normal_()[:, :4] += 0.7
        if name.endswith(("mlp.gate.weight", "router.weight")):
            value.data[HOT, :4] += 1
    return model
