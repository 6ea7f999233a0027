"""A stand-in for vllm-omni's offline API around diffusers' FLUX.1, for tests of the protocol between processes.

A test copies it to the paths of the modules that it stands for; requests for more than LIMIT images fail.
"""

from types import SimpleNamespace

import diffusers
import torch

LIMIT = 4
OmniDiffusionSamplingParams = SimpleNamespace


class CLIPTextModel:
    @classmethod
    def from_pretrained(cls, *args, **options):
        raise OSError("the pipeline's folder has no text encoder")


class FluxPipeline:
    def __init__(self, *, od_config):
        self.od_config, self.device, model = od_config, torch.device("cpu"), od_config.model
        self.text_encoder = CLIPTextModel.from_pretrained(model, subfolder="text_encoder").to(self.device)
        names = ("transformer", "text_encoder_2")
        self.weights_sources = [SimpleNamespace(subfolder=name) for name in names]
        kinds = {
            "transformer": diffusers.FluxTransformer2DModel, "vae": diffusers.AutoencoderKL,
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
        }  # fmt: skip
        parts = {name: kind.from_pretrained(model, subfolder=name) for name, kind in kinds.items()}
        none = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        self.pipe = diffusers.FluxPipeline(**parts, **none).to(od_config.dtype)

    def diffuse(self, embeddings, pooled, params):
        return self.pipe(
            prompt_embeds=embeddings, pooled_prompt_embeds=pooled, num_inference_steps=params.num_inference_steps,
            guidance_scale=params.guidance_scale, height=params.height, width=params.width, output_type="latent",
            generator=torch.Generator(params.generator_device).manual_seed(params.seed),
        ).images  # fmt: skip

    def forward(self, batch):
        (params,) = batch.sampling_params_list
        if params.num_outputs_per_prompt > LIMIT:
            raise ValueError(f"at most {LIMIT} images")
        embeddings, pooled, ids = self.encode_prompt(prompt=[p["prompt"] for p in batch.prompts])
        assert ids.shape == (embeddings.shape[1], 3) and not ids.any()
        latents, vae = self.diffuse(embeddings, pooled, params), self.pipe.vae
        wide = self.pipe._unpack_latents(latents, params.height, params.width, self.pipe.vae_scale_factor)
        images = vae.decode(wide / vae.config.scaling_factor + vae.config.shift_factor).sample
        return [SimpleNamespace(output=images, stage_durations=None)]


class Omni:
    def __init__(self, model, dtype, custom_pipeline_args, **options):
        module, _, name = custom_pipeline_args["pipeline_class"].rpartition(".")
        kind = getattr(__import__(module, fromlist=[name]), name)
        self.pipeline = kind(od_config=SimpleNamespace(model=model, dtype=getattr(torch, dtype)))
        assert [s.subfolder for s in self.pipeline.weights_sources] == ["transformer"]
        print("ready")  # standard output belongs to the host

    @torch.inference_mode()
    def generate(self, prompt, params, use_tqdm):
        (found,) = self.pipeline.forward(SimpleNamespace(prompts=[prompt], sampling_params_list=[params]))
        return [SimpleNamespace(images=list(found.output), stage_durations=found.stage_durations)]

    def close(self):
        print("closed")
