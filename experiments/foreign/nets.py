"""Eight Flax models of the package `transformers`, as they stand, with the shapes of a batch.

Only configurations are made; nothing is downloaded, and parameters are shapes.  Layers compute in
bfloat16, parameters are float32, and dropout is as each configuration has it by default.
"""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Net:
    """A model and the shapes of its batch.

    Attributes:
      sizes: in words, for a table.
      model: a `transformers.FlaxPreTrainedModel` without parameters of its own.
      inputs: by the names of the model's keywords.
      labels: class numbers for each of its results; those below 0 are not counted.
      key: whether the model takes a key for dropout.
    """

    sizes: str
    model: Any
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    labels: jax.ShapeDtypeStruct
    key: bool = True

    @property
    def weights(self) -> Any:
        """Shapes of the parameters that are trained."""
        variables = self.model.params_shape_tree
        return variables["params"] if "batch_stats" in variables else variables

    @property
    def statistics(self) -> Any:
        """Shapes of batch normalisation's running means; `{}` of models without."""
        return self.model.params_shape_tree.get("batch_stats", {})

    @property
    def has_option(self) -> bool:
        """Whether the model has a gradient checkpointing of its own."""
        import transformers

        base = transformers.FlaxPreTrainedModel
        own = type(self.model).enable_gradient_checkpointing
        return own is not base.enable_gradient_checkpointing

    def checkpointed(self) -> "Net":
        """The same with the model's own gradient checkpointing."""
        model = copy.copy(self.model)
        model.enable_gradient_checkpointing()
        return dataclasses.replace(self, model=model)

    def forward(self, weights: Any, statistics: Any, inputs: Any, key: jax.Array) -> Any:
        """Logits, and the new statistics."""
        params = {"params": weights, "batch_stats": statistics} if statistics else weights
        random = {"dropout_rng": key} if self.key else {}
        out = self.model(**inputs, params=params, train=True, **random)
        if statistics:
            out, changed = out
            statistics = changed["batch_stats"]
        return out.logits, statistics


# ---------------------------------------------------------------- the models


def llama(
    layers: int = 16, width: int = 2048, batch: int = 8, length: int = 1024, words: int = 32000
) -> Net:
    """Rotary positions, gated feed-forward layers of 2.75 times the width, no dropout."""
    model = _model(
        "Llama",
        "ForCausalLM",
        vocab_size=words,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_attention_heads=_heads(width),
        max_position_embeddings=length,
    )
    return _of_tokens(model, layers, width, batch, length)


def gpt2(
    layers: int = 24, width: int = 1024, batch: int = 8, length: int = 1024, words: int = 50257
) -> Net:
    """Of the medium size."""
    model = _model(
        "GPT2",
        "LMHeadModel",
        vocab_size=words,
        n_layer=layers,
        n_embd=width,
        n_head=_heads(width),
        n_positions=length,
    )
    return _of_tokens(model, layers, width, batch, length)


def gpt_neo(
    layers: int = 12, width: int = 768, batch: int = 8, length: int = 1024, words: int = 50257
) -> Net:
    """Of the small size: layers that attend to all, and to 256 tokens, in turn."""
    pairs = max(1, layers // 2)
    model = _model(
        "GPTNeo",
        "ForCausalLM",
        vocab_size=words,
        num_layers=2 * pairs,
        attention_types=[[["global", "local"], pairs]],
        hidden_size=width,
        num_heads=_heads(width),
        max_position_embeddings=length,
        window_size=min(256, length // 2),
    )
    return _of_tokens(model, 2 * pairs, width, batch, length)


def bert(
    layers: int = 12, width: int = 768, batch: int = 32, length: int = 512, words: int = 30522
) -> Net:
    """Of the base size, as a masked language model."""
    model = _model(
        "Bert",
        "ForMaskedLM",
        vocab_size=words,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=_heads(width),
        max_position_embeddings=length,
    )
    return _of_tokens(model, layers, width, batch, length)


def t5(
    layers: int = 12, width: int = 768, batch: int = 16, length: int = 512, words: int = 32128
) -> Net:
    """Of the base size: an encoder and a decoder of so many layers each."""
    _mend_t5()
    model = _model(
        "T5",
        "ForConditionalGeneration",
        vocab_size=words,
        num_layers=layers,
        d_model=width,
        d_ff=4 * width,
        num_heads=_heads(width),
        d_kv=min(64, width),
    )
    net = _of_tokens(model, f"{layers}+{layers}", width, batch, length)
    return dataclasses.replace(net, inputs={**net.inputs, "decoder_input_ids": net.labels})


def whisper(layers: int = 12, width: int = 768, batch: int = 16, frames: int = 3000) -> Net:
    """Of the small size: convolutions over 30 s of sound, an encoder, a decoder of 448 tokens."""
    length = min(448, frames // 2)
    model = _model(
        "Whisper",
        "ForConditionalGeneration",
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        encoder_attention_heads=_heads(width),
        decoder_attention_heads=_heads(width),
        max_source_positions=frames // 2,
        max_target_positions=length,
    )
    inputs = {
        "input_features": _floats(batch, model.config.num_mel_bins, frames),
        "decoder_input_ids": _integers(batch, length),
    }
    sizes = f"{layers}+{layers} layers of width {width}, {batch} x {frames} frames"
    return Net(sizes, model, inputs, _integers(batch, length))


def vit(layers: int = 12, width: int = 768, batch: int = 128, image: int = 224) -> Net:
    """Of the base size: patches of 16 by 16, which are 197 tokens with that of the class."""
    model = _model(
        "ViT",
        "ForImageClassification",
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=_heads(width),
        image_size=image,
        num_labels=1000,
    )
    inputs = {"pixel_values": _floats(batch, 3, image, image)}
    sizes = f"{layers} layers of width {width}, {batch} x {(image // 16) ** 2 + 1} tokens"
    return Net(sizes, model, inputs, _integers(batch))


def resnet(layers: int = 16, width: int = 64, batch: int = 128, image: int = 224) -> Net:
    """ResNet-50, with the state of batch normalisation; with fewer blocks, fewer in each stage."""
    depths = [max(1, number * layers // 16) for number in (3, 4, 6, 3)]
    model = _model(
        "ResNet",
        "ForImageClassification",
        depths=depths,
        embedding_size=width,
        hidden_sizes=[4 * width * 2**stage for stage in range(4)],
        num_labels=1000,
    )
    inputs = {"pixel_values": _floats(batch, 3, image, image)}
    sizes = f"{sum(depths)} blocks of width {width}, {batch} x {image} x {image}"
    return Net(sizes, model, inputs, _integers(batch), key=False)


NETS: dict[str, Callable[..., Net]] = {
    "Llama": llama,
    "GPT-2": gpt2,
    "GPT-Neo": gpt_neo,
    "BERT": bert,
    "T5": t5,
    "Whisper": whisper,
    "ViT": vit,
    "ResNet-50": resnet,
}

_TOKENS = {"layers": 1, "width": 32, "batch": 2, "length": 32, "words": 64}
_IMAGES = {"layers": 1, "width": 32, "batch": 2, "image": 32}
# To see that it runs.
SMALL: dict[str, dict[str, int]] = {
    **dict.fromkeys(("GPT-2", "GPT-Neo", "BERT", "T5"), _TOKENS),
    "Llama": {**_TOKENS, "length": 64},  # its rotary table takes no fewer than two heads' widths
    "Whisper": {"layers": 1, "width": 32, "batch": 2, "frames": 64},
    **dict.fromkeys(("ViT", "ResNet-50"), _IMAGES),
}

# ---------------------------------------------------------------- implementation


def _of_tokens(model: Any, layers: int | str, width: int, batch: int, length: int) -> Net:
    tokens = _integers(batch, length)
    sizes = f"{layers} layers of width {width}, {batch} x {length} tokens"
    return Net(sizes, model, {"input_ids": tokens}, tokens)


def _model(family: str, task: str, **config: Any) -> Any:
    """A model of this family for this task, without parameters of its own."""
    with _quiet() as transformers:
        made = getattr(transformers, f"{family}Config")(**config)
        kind = getattr(transformers, f"Flax{family}{task}")
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "_do_init": False}
        if family == "ViT":
            options["input_shape"] = (1, made.image_size, made.image_size, 3)
        return kind(made, **options)


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """The package, which neither downloads nor says that its Flax models are deprecated."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)


def _mend_t5() -> None:
    """T5's file clips with a keyword that jax has removed; it alone gets it back."""
    from transformers.models.t5 import modeling_flax_t5

    class Mended:
        clip = staticmethod(lambda x, *, a_max: jnp.minimum(x, a_max))

        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

    setattr(modeling_flax_t5, "jnp", Mended())  # noqa: B010


def _heads(width: int) -> int:
    """Of 64 each."""
    return max(1, width // 64)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
