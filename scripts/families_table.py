"""Write docs/families.md: for every causal family that transformers can build, whether kvbench measures it.

python scripts/families_table.py [MODEL_TYPE ...]      the whole table, or the lines of some families on stdout

A tiny model with random weights is built of each family and put through the gate (kvbench.gate).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "docs" / "families.md"

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    # mixtures of experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    # other names of the sizes above
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "n_inner": 96,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "ffn_dim": 96,
    "d_ff": 96,
    "num_layers": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 96,
    "mlp_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "attention_hidden_size": 64,
    "global_head_dim": 16,
    "attention_head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_seq_len": 512,
    "rotary_dim": 8,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "lru_width": 64,
}

ATTENDING = ["linear_attention", "full_attention"] * 2
ROTARY = {"rope_type": "default", "rope_theta": 1e4}

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bert-generation": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ATTENDING},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {"n_groups": 1, "num_hidden_layers": None},
    "qwen4_exp_text": {
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides, by model type; None leaves a size out."""


@dataclass(frozen=True)
class Outcome:
    """result: exact, refused, or failed (which the tests do not allow). detail: the difference, or the refusal."""

    kind: str
    result: str
    detail: str

    @property
    def line(self) -> str:
        """A line of the table."""
        return f"| `{self.kind}` | {self.result} | {self.detail} |"


def kinds() -> list[str]:
    """The model types of every family that AutoModelForCausalLM can build, sorted."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return sorted(kind for kind in CONFIG_MAPPING if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING)


def settings_of(kind: str) -> dict[str, Any]:
    """The `model.random` node of a tiny model of the family."""
    from transformers import CONFIG_MAPPING

    from kvbench.models.shape import modelling_source

    own = OWN.get(kind, {})
    config_class = CONFIG_MAPPING[kind]
    try:
        base = config_class()
    except Exception:  # a class whose own defaults it refuses
        return {"model_type": kind, **own}
    known, aliases = set(base.to_dict()), getattr(base, "attribute_map", None) or {}
    found = {key: value for key, value in SIZES.items() if key in known and key not in own}
    for alias, name in aliases.items():
        if name in SIZES or alias in SIZES:
            found.pop(alias, None)
            found.setdefault(name, SIZES.get(alias, SIZES.get(name)))
    masks = modelling_source(config_class)
    if "create_sliding_window_causal_mask" not in masks:
        found.pop("sliding_window", None)
    elif "use_sliding_window" in known:
        found |= {"use_sliding_window": True, "max_window_layers": 2}
    if "qk_rope_head_dim" in found:  # the size of a head follows
        found |= {"num_key_value_heads": 4}
        found.pop("head_dim", None)
    kinds_of_layers = list(dict.fromkeys(getattr(base, "layer_types", None) or []))
    if kinds_of_layers and "layer_types" in known:
        found["layer_types"] = (kinds_of_layers * 4)[:4]
    given = {key: value for key, value in (found | own).items() if value is not None}
    return {"model_type": kind, **given}


def outcome(kind: str) -> Outcome:
    """Build the family's tiny model and put it through the gate; refused means: before anything is measured."""
    from kvbench.errors import UserError
    from kvbench.gate import gate
    from kvbench.models.load import load_model, model_spec

    try:
        settings = settings_of(kind)
        loaded = load_model(model_spec({"name": "the model", "random": settings, "device": "cpu"}))
        found = gate(loaded)
    except UserError as error:
        detail = " ".join(str(error).split())
        return Outcome(kind, "failed" if detail.startswith("cannot load") else "refused", detail)
    except Exception as error:
        return Outcome(kind, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Outcome(kind, "exact", f"{found.difference:.0e}")


def table(outcomes: Iterable[Outcome]) -> str:
    """docs/families.md."""
    import transformers

    rows = list(outcomes)
    exact = sum(row.result == "exact" for row in rows)
    return "\n".join(
        [
            "# Model families",
            "",
            f"Every causal family of transformers {transformers.__version__} ({len(rows)}), as a tiny model with "
            f"random weights in float32. {exact} are exact, {len(rows) - exact} are refused before anything is "
            "measured.",
            "",
            "*Exact*: a prompt of 64 tokens and 32 single steps through the full cache give the model's own forward's "
            "logits; the number is the largest difference as a share of the largest logit. The same check runs before "
            "every measurement (`kvbench.gate`). *Refused*: the line that a run ends with.",
            "",
            "Written by `python scripts/families_table.py`.",
            "",
            "| family | result | largest difference, or the refusal |",
            "|---|---|---|",
            *(row.line for row in rows),
            "",
        ]
    )


def main(wanted: list[str]) -> int:
    """Print the named families' lines; without names, write the table."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    found = []
    for kind in wanted or kinds():
        found.append(outcome(kind))
        print(found[-1].line, flush=True)
    if not wanted:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table(found), encoding="utf-8")
    return any(row.result == "failed" for row in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
