"""The declaration that ends every model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Architecture:
    """The declaration of a model, which the registry reads without importing the file: all values are literals.

    names           `architectures` in config.json, e.g. ("LlamaForCausalLM",)
    category        the folder of the model file
    model           class in the same file, or "module:Class"; by default the one that builds what the file's
                    `describe(config)` returns, a description.Decoder
    runner          how the engine runs the model: a key of fastkernels.engine.options.runners.RUNNERS
    model_type      `model_type` in config.json
    aliases         other values of it, whose config.json has the same fields with the same meaning
    timm            prefixes of `architecture` in timm's config.json, which has no `architectures`
    ultralytics     prefixes of `model` in ultralytics' config.json, which has no `architectures`
    inputs          what the model reads: 'tokens', 'images' or 'videos' (see models/vision/dinov3.py), 'prompts' (see
                    common/pipelines/pipeline.py), or 'text' (to speak)
    folders         of a diffusers pipeline: folders whose weights the model holds, the denoiser's first. Keys begin
                    with the folder's name
    files           {stem of a file of weights: prefix of its keys}, for a checkpoint whose parts are in files of their
                    own, as safetensors or in PyTorch's format
    media           what prompts may hold next to tokens: 'image', 'video', 'audio' (see layers/media.py), or 'audio'
                    alone (audio/whisper.py). The fields of the text model may be in its config's `text_config`
    layers          level-3 ops that the model is built of
    packed          {our module: [checkpoint modules]}: weights that are stacked into one parameter, in order; Llama's
                    by default
    experts         "module:function" that maps a config to vLLM's expert mapping (weights.expert_parts)
    absent          "module:function" that maps a config to patterns (fnmatch) of checkpoint keys that its checkpoints
                    leave out: those parts of our parameters are zero
    text_of         architectures with images or sound whose text model this is, or with another part that this is; its
                    config is their field `within`
    prefixes        {prefix of a checkpoint key of these: prefix of the key in a checkpoint of this one}
    renamed         {prefix of a checkpoint key: prefix of our parameter}; the first that fits counts
    repeated        patterns of our names (fnmatch) whose tensors a checkpoint may hold twice, under another key that
                    `renamed` maps to the same name
    parts           {part of a checkpoint key: part of ours}, whole names between dots, applied after `renamed`
    stacked         "module:function" of a key and the config, for checkpoints that stack the tensors of layers: yields
                    (key, index in the first dimension or None, whether it is transposed) of the tensors in it
    needed          {pattern (fnmatch) of checkpoint keys: what they are}, for the error if they are missing
    quantization    values of quantization_config's quant_method whose weights the model's own parameters hold
    unneeded        "module:function" that maps a config to such patterns that depend on its sizes
    unused          patterns (fnmatch) of checkpoint keys that the model does not need
    tied            {key that tie_word_embeddings makes unused: key that it copies}
    head            architecture of a head for multi-token prediction that its checkpoints may hold (see layers/mtp.py)
    first_position  config field behind whose value the positions begin: rows up to it in the position table are unused
    heads           {file: prefix of its keys}: heads in PyTorch's format that may be next to the weights;
                    config.heads lists those that it has
    settings        {file of JSON next to the weights: config field that gets its content, None without the file}
    sizes           {size: its name in config.json}, where it is not transformers' usual one ('' if it has none)
    config_fields   fields beyond config.COMMON that let config.json be read without transformers; None: it is
                    always read by transformers
    config_defaults values of fields that config.json may leave out
    own_config      "module:function" that maps the table of a config.json to the fields of a config, for a model
                    type that transformers does not have
    fast_tokenizer  AutoTokenizer selects the generic fast tokenizer class for this model type
    public          {hub id: config fields} of public checkpoints, for estimates without a download
    """

    names: tuple[str, ...]
    category: str
    runner: str
    model_type: str
    aliases: tuple[str, ...] = ()
    timm: tuple[str, ...] = ()
    ultralytics: tuple[str, ...] = ()
    model: str = "fastkernels.models.common.layers.decoder:Decoder"
    inputs: str = "tokens"
    files: Mapping[str, str] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    packed: Mapping[str, Sequence[str]] = field(default_factory=lambda: PACKED)
    experts: str = ""
    absent: str = ""
    unneeded: str = ""
    text_of: tuple[str, ...] = ()
    within: str = "text_config"
    prefixes: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    stacked: str = ""
    needed: Mapping[str, str] = field(default_factory=dict)
    quantization: tuple[str, ...] = ()
    unused: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    tied: Mapping[str, str] = field(default_factory=dict)
    head: str = ""
    first_position: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    config_fields: tuple[str, ...] | None = None
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    own_config: str = ""
    fast_tokenizer: bool = False
    public: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def own_key(self, key: str) -> str:
        """Our name of a checkpoint key, before packing."""
        for other, prefix in self.prefixes.items():
            if key.startswith(other):
                key = prefix + key.removeprefix(other)
                break
        for theirs, ours in self.renamed.items():
            if key.startswith(theirs):
                key = ours + key.removeprefix(theirs)
                break
        for theirs, ours in self.parts.items():
            key = f".{key}.".replace(f".{theirs}.", f".{ours}.")[1:-1]
        return key

    def checkpoint_key(self, key: str) -> str:
        """The checkpoint key of one of our names; the inverse of own_key."""
        for theirs, ours in self.parts.items():
            key = f".{key}.".replace(f".{ours}.", f".{theirs}.")[1:-1]
        for theirs, ours in self.renamed.items():
            if key.startswith(ours):
                return theirs + key.removeprefix(ours)
        return key
