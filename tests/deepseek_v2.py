"""What DeepSeek published of its V2 models, for tests."""

from __future__ import annotations

from typing import Any

# config.json of deepseek-ai/DeepSeek-V2-Lite on the Hugging Face hub, but for training settings and token ids.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
# The same of deepseek-ai/DeepSeek-V2, where it differs.
V2: dict[str, Any] = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}


def transformers_4_to_5(config: dict[str, Any]) -> Any:
    from transformers import DeepseekV2Config

    rope = {**config["rope_scaling"], "rope_type": "yarn", "rope_theta": float(config["rope_theta"])}
    return DeepseekV2Config(**{k: v for k, v in config.items() if k != "rope_scaling"}, rope_parameters=rope)
