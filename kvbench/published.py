"""What the config.json of some models says of their size, so that `kvbench.plan` needs no network for them."""

from typing import Any

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}

PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": LLAMA | {
        "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096},
    "meta-llama/Llama-2-13b-hf": LLAMA | {
        "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 40,
        "intermediate_size": 13824, "vocab_size": 32000, "max_position_embeddings": 4096},
    "meta-llama/Llama-3.1-8B": LLAMA | {
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072},
    "mistralai/Mistral-7B-v0.3": LLAMA | {
        "model_type": "mistral", "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 32768, "max_position_embeddings": 32768, "sliding_window": None},
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False},
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True},
    "google/gemma-2-2b": {
        "model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000,
        "max_position_embeddings": 8192, "sliding_window": 4096},
    "google/gemma-3-1b-pt": {
        "model_type": "gemma3_text", "num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144,
        "max_position_embeddings": 32768, "sliding_window": 512},
    "deepseek-ai/DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "vocab_size": 102400, "max_position_embeddings": 163840},
}  # fmt: skip
