"""What a model's config.json says, checked; and the tensors such a model has. No torch.

Owns: `ModelConfig`, the families that are supported, and `weight_shapes` (names and shapes of all tensors, which a test
holds against the module's parameters), so that a model folder can be judged before anything heavy is started.
Does not: read files (hf_folder.py, folder_check.py) or compute (qwen3.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridsched.errors import DataError

SUPPORTED_FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    ``attention_bias`` is the bias of the q, k and v projections, ``attention_out_bias`` that of the output projection
    (Qwen2 has the first only). ``eos_token_ids`` may be empty. ``num_experts`` above 0: every layer is a mixture of
    experts of ``moe_intermediate_size`` (Qwen3-MoE), and ``intermediate_size`` is not used.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    qk_norm: bool = True
    attention_bias: bool = False
    attention_out_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise DataError(f"model config: {name} is {getattr(self, name)}, it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DataError(
                f"model config: num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise DataError(f"model config: head_dim is {self.head_dim}, rotary embeddings need an even number")
        if self.qk_norm and self.attention_bias != self.attention_out_bias:
            raise DataError("model config: Qwen3 attention has a bias on all four projections or on none")
        if self.attention_out_bias and not self.attention_bias:
            raise DataError("model config: attention_out_bias without attention_bias is none of the supported families")
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not self.qk_norm:
            raise DataError("model config: a mixture of experts is supported for Qwen3 only")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise DataError(
                f"model config: num_experts_per_tok is {self.num_experts_per_tok}, it must be between 1 and "
                f"num_experts ({self.num_experts})"
            )
        if self.moe_intermediate_size < 1:
            raise DataError(f"model config: moe_intermediate_size is {self.moe_intermediate_size}, it must be positive")

    @property
    def model_type(self) -> str:
        """Hugging Face family with exactly this architecture."""
        if self.qk_norm:
            return "qwen3_moe" if self.num_experts else "qwen3"
        return "qwen2" if self.attention_bias and not self.attention_out_bias else "llama"

    @staticmethod
    def from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """From the contents of a config.json (transformers 4 or 5 style). ``source`` names it in errors.

        Raises DataError for other families and for features this implementation does not have.
        """
        family = raw.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            raise DataError(
                f"{source}: model_type {family!r} is not supported; the families {', '.join(SUPPORTED_FAMILIES)} are"
            )
        _refuse_unsupported(raw, family, source)
        qwen3 = family in ("qwen3", "qwen3_moe")
        try:
            heads = int(raw["num_attention_heads"])
            hidden = int(raw["hidden_size"])
            bias = bool(raw.get("attention_bias", False)) if family != "qwen2" else True
            return ModelConfig(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(raw["intermediate_size"]),
                num_hidden_layers=int(raw["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or (128 if qwen3 else hidden // heads)),
                rope_theta=_rope_theta(raw, source),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                max_position_embeddings=int(raw.get("max_position_embeddings", 32768)),
                qk_norm=qwen3,
                attention_bias=bias,
                attention_out_bias=bias and family != "qwen2",
                bos_token_id=_optional_id(raw.get("bos_token_id")),
                eos_token_ids=_ids(raw.get("eos_token_id")),
                pad_token_id=_optional_id(raw.get("pad_token_id")),
                **(_experts(raw) if family == "qwen3_moe" else {}),
            )
        except DataError as error:  # of __post_init__, which knows no file
            raise DataError(str(error).replace("model config:", f"{source}:", 1)) from error
        except KeyError as error:
            raise DataError(f"{source}: key {error.args[0]!r} is missing; the file must describe the model") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise DataError(f"{source}: a value has the wrong type ({error})") from error

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Contents of a config.json that transformers (4 and 5), vLLM and `from_hf` read."""
        family = self.model_type
        out: dict[str, Any] = {
            "architectures": [
                {
                    "qwen3": "Qwen3ForCausalLM",
                    "qwen3_moe": "Qwen3MoeForCausalLM",
                    "qwen2": "Qwen2ForCausalLM",
                    "llama": "LlamaForCausalLM",
                }[family]
            ],
            "model_type": family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _eos_to_hf(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
        }
        if family != "qwen2":
            out["attention_bias"] = self.attention_bias
        if family == "llama":
            out["mlp_bias"] = False
        if self.num_experts:
            out |= {name: getattr(self, name) for name in _EXPERT_KEYS}
            out |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.0}
        return out


_EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of Qwen3-MoE. transformers 5 writes num_experts as num_local_experts, and leaves out what is false."""
    raw = {"num_experts": raw["num_local_experts"], **raw} if "num_local_experts" in raw else raw
    sizes = {name: int(raw[name]) for name in _EXPERT_KEYS[:3]}
    if sizes["num_experts"] < 1:
        raise ValueError("num_experts of a qwen3_moe model is not positive")
    return {**sizes, "norm_topk_prob": bool(raw.get("norm_topk_prob", False))}


def _refuse_unsupported(raw: Mapping[str, Any], family: str, source: str) -> None:
    """DataError when the file asks for something `CausalLM` does not compute."""
    if raw.get("hidden_act", "silu") != "silu":
        raise DataError(f"{source}: hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    sliding = "sliding_attention" in (raw.get("layer_types") or ())
    if sliding or (family != "llama" and raw.get("use_sliding_window", False)):
        raise DataError(f"{source}: sliding-window attention is not supported; use a model with full attention")
    if raw.get("mlp_bias", False):
        raise DataError(f"{source}: mlp_bias true is not supported")
    if family == "qwen3_moe" and (raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1):
        raise DataError(f"{source}: dense layers between mixtures of experts are not supported (mlp_only_layers)")
    if raw.get("quantization_config"):
        raise DataError(f"{source}: quantized weights are not supported; use the unquantized model")


def _rope_theta(raw: Mapping[str, Any], source: str) -> float:
    """Base of the rotary angles, from either place; scaled variants are refused."""
    for key in ("rope_parameters", "rope_scaling"):
        scaling = raw.get(key) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise DataError(f"{source}: {key} of type {kind!r} is not supported; only plain rotary embeddings are")
    parameters = raw.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids from null, a number or a list."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _optional_id(value: Any) -> int | None:
    """First of the ids, None without one."""
    ids = _ids(value)
    return ids[0] if ids else None


def _eos_to_hf(ids: tuple[int, ...]) -> int | list[int] | None:
    """Spelling of config.json: null, number or list."""
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor; a tied head has none of its own."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        layer[f"self_attn.{name}.weight"] = (size, hidden)
        if config.attention_bias:
            layer[f"self_attn.{name}.bias"] = (size,)
    layer["self_attn.o_proj.weight"] = (hidden, width)
    if config.attention_out_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    if config.num_experts:
        layer["mlp.gate.weight"] = (config.num_experts, hidden)
        for expert in range(config.num_experts):
            layer |= _mlp_shapes(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size)
    else:
        layer |= _mlp_shapes("mlp", hidden, inner)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The three matrices of one SwiGLU."""
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
