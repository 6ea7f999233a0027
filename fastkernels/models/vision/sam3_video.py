"""SAM 3 for clips (Carion et al., arXiv 2511.16719): the objects that texts name, followed through the frames.

The detector of sam3.py looks at each frame. The tracker, which is that of SAM 2 (Ravi et al., arXiv 2408.00714), moves
the masks of earlier frames with a memory of each object; interfaces/tracks.py has the rules that join both. Images
alone are the detector's, and those with points, a box or a mask the tracker's (sam3_tracker.py). The interface is that
of models/common/interfaces/segmenter.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces import tracks
from fastkernels.models.common.interfaces.segmenter import (
    Clip,
    ClipSegmenter,
    Found,
    FrameObjects,
    Marked,
    MarkSegmenter,
    Seen,
)
from fastkernels.models.common.layers import cnn
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.models.vision import sam3
from fastkernels.models.vision.sam3 import EPS, GELU, PLAIN, encodings, rotations
from fastkernels.models.vision.sam3_tracker import (
    CONV_EPS,
    Attention,
    Layers,
    Marking,
    _gelu,
    _normed,
    _product,
    _resized,
    check_marks,
)
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.dense_attention.memory_attention import memory_attention
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.norm.vllm import VllmLayerNorm
from fastkernels.overrides.rope.rope_nd import rope_nd

T = torch.Tensor
ABSENT = -1024.0  # the logit of all pixels of an object that is not in the frame
SURE = 10.0  # logits of a mask that is given: 10 inside, -10 outside
PLACES = 0.1  # the weight of the encodings of places that the memory attention adds
AT_ONCE = 16  # objects that go through the tracker together
LEVELS = [4.0, 2.0, 1.0, 0.5]


def check(config: Any) -> None:
    """Raise Unsupported for what the tracker does not do. config: transformers.Sam3VideoConfig"""
    own, vision = config.tracker_config, config.detector_config.vision_config
    if own.model_type != "sam3_tracker_video":
        raise Unsupported(f"config.tracker_config.model_type={own.model_type!r} is not 'sam3_tracker_video'")
    width, backbone = vision.fpn_hidden_size, vision.backbone_config
    side = backbone.image_size // backbone.patch_size
    if list(vision.scale_factors) != LEVELS:
        raise Unsupported(
            f"scale_factors={vision.scale_factors} of a model of clips are not {LEVELS}, which the tracker reads"
        )
    check_marks(own, vision)
    for name, value in (
        ("memory_attention_hidden_size", own.memory_attention_hidden_size),
        ("memory_encoder_hidden_size", own.memory_encoder_hidden_size),
        ("memory_fuser_embed_dim", own.memory_fuser_embed_dim),
        ("mask_downsampler_embed_dim", own.mask_downsampler_embed_dim),
    ):
        if value != width:
            raise Unsupported(f"tracker_config.{name}={value} is not vision_config.fpn_hidden_size={width}")
    if list(own.memory_attention_rope_feat_sizes) != [side, side]:
        raise Unsupported(
            f"tracker_config.memory_attention_rope_feat_sizes={own.memory_attention_rope_feat_sizes} are not"
            f" [{side}, {side}], the cells of the detector's image"
        )
    for name, value, known in (
        ("memory_attention_feed_forward_hidden_act", own.memory_attention_feed_forward_hidden_act, ("relu",)),
        ("memory_fuser_hidden_act", own.memory_fuser_hidden_act, tuple(GELU)),
        ("mask_downsampler_hidden_act", own.mask_downsampler_hidden_act, ("gelu",)),
        ("num_maskmem", own.num_maskmem, range(1, 1025)),
        ("max_object_pointers_in_encoder", own.max_object_pointers_in_encoder, range(2, 1025)),
    ):
        if value not in known:
            wanted = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(known)
            raise Unsupported(f"tracker_config.{name}={value!r} is not supported, only {wanted}")
    narrow, heads = width // own.memory_attention_downsample_rate, own.memory_attention_num_attention_heads
    if narrow % heads or width % heads:
        raise Unsupported(f"{narrow} channels of the memory attention are no multiple of its {heads} heads")
    if narrow // heads % 4:
        raise Unsupported("the heads of the memory attention are no multiple of 4 channels")
    if width % size_of(own, "memory_encoder_output_channels"):
        raise Unsupported(
            f"tracker_config.memory_encoder_output_channels={own.memory_encoder_output_channels} is no divisor of"
            f" {width}: a pointer has as many tokens as fit"
        )
    steps = math.log2(own.mask_downsampler_total_stride) // math.log2(own.mask_downsampler_stride)
    if own.mask_downsampler_stride**steps != 16:
        raise Unsupported(
            f"tracker_config.mask_downsampler_total_stride={own.mask_downsampler_total_stride} is not 16: masks of 16"
            " pixels a side for each cell become cells"
        )
    if (rope := own.rope_parameters or {}).get("rope_type", "axial") != "axial":
        raise Unsupported(f"rope_type={rope['rope_type']!r} of the tracker is not supported, only 'axial'")


class CellAttention(nn.Module):
    """Attention among cells x [B, S, C] with their rotations; the residual is added."""

    ops = ("rope_nd", "attention_dense", "linear_residual")

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, inner
        self.qk_proj, self.v_proj = cnn.Stacked(width, (inner, inner)), cnn.Classifier(width, inner)
        self.o_proj = cnn.Classifier(inner, width)

    def forward(self, x: T, rotation: tuple[T, T], residual: T) -> T:
        q, k = self.qk_proj(x).split(self.inner, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, self.v_proj(x)))
        q, k = (rope_nd(t, *rotation, False) for t in (q, k))
        mixed = attention_dense(q, k, v, q.shape[-1] ** -0.5).flatten(2)
        return linear_residual(residual, mixed, self.o_proj.weight, self.o_proj.bias)


class MemoryLayer(nn.Module):
    """Attention among the cells of a frame and to the memory of an object, and an MLP, each behind a norm."""

    ops = ("memory_attention", "linear_residual")

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.memory_attention_hidden_size, config.memory_attention_feed_forward_hidden_size
        narrow = width // config.memory_attention_downsample_rate
        heads, memory = config.memory_attention_num_attention_heads, config.memory_encoder_output_channels
        self.self_attn = CellAttention(width, narrow, heads)
        self.cross_attn_image = Attention(width, narrow, heads, memory)
        self.linear1, self.linear2 = cnn.Classifier(width, inner), cnn.Classifier(inner, width)
        self.layer_norm1, self.layer_norm2, self.layer_norm3 = (VllmLayerNorm(width, EPS) for _ in range(3))

    def forward(self, x: T, keys: T, values: T, rotation: tuple[T, T], pointers: int) -> T:
        """keys, values: [B, pointers + frames * cells, memory]."""
        x = self.self_attn(self.layer_norm1(x), rotation, x)
        q, k, v = self.cross_attn_image.project(self.layer_norm2(x), keys, values)
        mixed = memory_attention(q, k, v, *rotation, pointers, q.shape[-1] ** -0.5)
        x = self.cross_attn_image.finish(mixed, x)
        h = F.relu_(self.linear1(self.layer_norm3(x)))
        return linear_residual(x, h, self.linear2.weight, self.linear2.bias)


class MemoryAttention(nn.Module):
    """The cells of a frame [B, S, C] with what is remembered of an object."""

    def __init__(self, config: Any, side: int) -> None:
        super().__init__()
        width = config.memory_attention_hidden_size
        narrow = width // config.memory_attention_downsample_rate
        self.side, self.head = side, narrow // config.memory_attention_num_attention_heads
        self.theta = float((config.rope_parameters or {}).get("rope_theta", sam3.TEMPERATURE))
        self.layers = nn.ModuleList(MemoryLayer(config) for _ in range(config.memory_attention_num_layers))
        self.layer_norm = VllmLayerNorm(width, EPS)

    def forward(self, cells: T, keys: T, values: T, pointers: int) -> T:
        x = cells + PLACES * encodings(self.side, cells.shape[2], cells.device, cells.dtype)
        rotation = rotations(self.side, self.head, self.theta, 1.0, 0, x.device)
        for layer in self.layers:
            x = layer(x, keys, values, rotation, pointers)
        return self.layer_norm(x)


class Shrink(nn.Module):
    """A convolution of a mask [B, C, H, W], a norm over its channels, and GELU."""

    ops = ("conv_norm_act",)

    def __init__(self, channels: int, out: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.conv = cnn.Conv(channels, out, kernel, stride, bias=True, padding=padding)
        self.layer_norm = VllmLayerNorm(out, CONV_EPS)

    def forward(self, x: T) -> T:
        return _gelu(_normed(cnn.convolve(x, self.conv, None, PLAIN), self.layer_norm))


class Fuser(nn.Module):
    """A ConvNeXt block of cells [B, S, C]."""

    ops = ("conv_norm_act", "linear_gelu", "linear")

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.memory_fuser_embed_dim, config.memory_fuser_intermediate_dim
        self.depthwise_conv = cnn.Conv(
            width, width, config.memory_fuser_kernel_size, 1, width, True, config.memory_fuser_padding
        )
        self.layer_norm, self.scale = VllmLayerNorm(width, CONV_EPS), nn.Parameter(torch.empty(width))
        self.pointwise_conv1, self.pointwise_conv2 = (
            cnn.Classifier(width, inner),
            cnn.Classifier(inner, width),
        )
        self.shape = GELU[config.memory_fuser_hidden_act]

    def forward(self, x: T, side: int) -> T:
        image = cnn.convolve(sam3._image(x, side), self.depthwise_conv, None, PLAIN)
        h = self.layer_norm(sam3._rows(image).contiguous())
        h = linear_gelu(h, self.pointwise_conv1.weight, self.pointwise_conv1.bias, self.shape)
        return torch.addcmul(x, self.pointwise_conv2(h), self.scale)


class MemoryEncoder(nn.Module):
    """Cells of a frame [B, S, C] and masks [B, 1, 16 * side, 16 * side] to a memory [B, S, memory]."""

    def __init__(self, config: Any, side: int) -> None:
        super().__init__()
        width, self.side = config.memory_encoder_hidden_size, side
        stride = config.mask_downsampler_stride
        self.mask_downsampler: Any = nn.Module()
        layers, channels = nn.ModuleList(), 1
        for _ in range(int(math.log2(config.mask_downsampler_total_stride) // math.log2(stride))):
            kernel, padding = config.mask_downsampler_kernel_size, config.mask_downsampler_padding
            layers.append(Shrink(channels, channels * stride**2, kernel, stride, padding))
            channels *= stride**2
        self.mask_downsampler.layers = layers
        self.mask_downsampler.final_conv = cnn.Conv(channels, width, bias=True)
        self.feature_projection = cnn.Conv(width, width, bias=True)
        self.memory_fuser: Any = nn.Module()
        self.memory_fuser.layers = nn.ModuleList(Fuser(config) for _ in range(config.memory_fuser_num_layers))
        self.projection = cnn.Conv(width, config.memory_encoder_output_channels, bias=True)

    def forward(self, cells: T, masks: T) -> T:
        for layer in self.mask_downsampler.layers:
            masks = layer(masks)
        x = _product(cells, self.feature_projection) + _product(
            sam3._rows(masks), self.mask_downsampler.final_conv
        )
        for layer in self.memory_fuser.layers:
            x = layer(x, self.side)
        return _product(x, self.projection)


class Decided(NamedTuple):
    """masks [B, 4 * side, 4 * side] float32 logits; scores [B] float32, logits of presence; pointers [B, C]."""

    masks: T
    scores: T
    pointers: T


class Tracker(Marking):
    """transformers' Sam3TrackerVideoModel without a backbone, for objects that a mask names."""

    def __init__(self, config: Any, side: int, image_size: int) -> None:
        super().__init__(config, side)
        width, memory = config.memory_attention_hidden_size, config.memory_encoder_output_channels
        self.config, self.image_size, self.memory = config, image_size, memory
        self.memory_attention = MemoryAttention(config, side)
        self.memory_encoder = MemoryEncoder(config, side)
        self.memory_temporal_positional_encoding = nn.Parameter(torch.empty(config.num_maskmem, 1, 1, memory))
        self.no_object_pointer = nn.Parameter(torch.empty(1, width))
        self.mask_downsample = cnn.Conv(1, 1, 4, 4, bias=True, padding=0)
        self.object_pointer_proj = Layers(width, width, width, 3)
        if config.enable_temporal_pos_encoding_for_object_pointers:
            self.temporal_positional_encoding_projection_layer = cnn.Classifier(width, memory)
        if config.enable_occlusion_spatial_embedding:
            self.occlusion_spatial_embedding_parameter = nn.Parameter(torch.empty(1, memory))
        self.several = bool(
            config.multimask_output_in_sam
            and config.multimask_output_for_tracking
            and config.multimask_min_pt_num <= 0 <= config.multimask_max_pt_num
        )

    def _decide(self, cells: T, seen: Seen, several: bool) -> Decided:
        decoder = self.mask_decoder
        prompt = self.prompt_encoder.not_a_point_embed.weight.expand(len(cells), 2, -1)
        found, overlaps, tokens, scores = decoder(
            cells, seen.fine, seen.middle, self.places, prompt, self.side
        )
        chosen = decoder.best(overlaps) if several else decoder.single(found, overlaps)
        at = torch.arange(len(cells), device=cells.device)
        masks, token = found[at, chosen], tokens[at, chosen if several else 0]
        there = scores > 0
        pointers = torch.where(there[:, None], self.object_pointer_proj(token), self.no_object_pointer)
        return Decided(torch.where(there[:, None, None], masks, ABSENT), scores, pointers)

    def propagate(self, seen: Seen, memories: T, placed: T, pointers: int) -> Decided:
        """The masks of B objects in a frame. memories, placed: [B, pointers + frames * S, memory], bare and placed."""
        cells = seen.cells.expand(len(memories), -1, -1)
        cells = self.memory_attention(cells, placed, memories, pointers)
        return self._decide(cells + self.prompt_encoder.no_mask_embed.weight, seen, self.several)

    def enter(self, seen: Seen, masks: T) -> tuple[T, T, T]:
        """New objects by their masks [B, h, w] of bool: (masks of image_size, logits of presence [B], pointers)."""
        size, cells = 2 * (self.image_size,), seen.cells
        given = _resized(masks[:, None].float(), size)
        small = cnn.convolve(given.to(cells.dtype), self.mask_downsample, None, PLAIN)
        dense = self.prompt_encoder.mask_embed(
            _resized(small.float(), (4 * self.side,) * 2).to(cells.dtype).contiguous()
        )
        there = masks.flatten(1).any(1)
        found = self._decide(cells + dense, seen, True)
        pointers = torch.where(there[:, None], found.pointers, self.no_object_pointer)
        return given * 2 * SURE - SURE, torch.where(there, SURE, -SURE), pointers

    def remember(self, seen: Seen, masks: T, scores: T, hard: bool) -> T:
        """Memories [B, S, memory] bfloat16 of masks [B, 1, h, w], logits; scores [B]; hard: of masks of 0 and 1."""
        wide = _resized(masks, (16 * self.side,) * 2)
        wide = (wide > 0).float() if hard else wide.sigmoid()
        wide = wide * self.config.sigmoid_scale_for_mem_enc + self.config.sigmoid_bias_for_mem_enc
        cells = seen.cells.expand(len(masks), -1, -1)
        found = self.memory_encoder(cells, wide.to(cells.dtype))
        if self.config.enable_occlusion_spatial_embedding:
            hidden = (scores <= 0)[:, None, None]
            found = torch.where(hidden, found + self.occlusion_spatial_embedding_parameter, found)
        return found.to(torch.bfloat16)  # as transformers keeps them

    def ages(self, distances: Sequence[int], most: int) -> T:
        """Encodings of the ages of pointers [n, memory], in frames."""
        weight = self.no_object_pointer
        if not self.config.enable_temporal_pos_encoding_for_object_pointers:
            return weight.new_zeros(len(distances), self.memory)
        half = weight.shape[1] // 2
        rates = sam3.TEMPERATURE ** (2 * (torch.arange(half, device=weight.device) // 2) / half)
        angles = torch.tensor(distances, device=weight.device)[:, None] / (most - 1) / rates
        waves = torch.cat((angles.sin(), angles.cos()), 1).to(weight.dtype)
        return self.temporal_positional_encoding_projection_layer(waves)


@dataclass
class Memory:
    """Of an object in a frame: cells [S, memory] bfloat16, and its pointer [C]."""

    cells: T
    pointer: T


@dataclass
class Track:
    """An object. given: {frame: memory} where the detector has said its mask; others: where the tracker has."""

    number: int
    prompt: int
    score: float
    given: dict[int, Memory] = field(default_factory=dict)
    others: dict[int, Memory] = field(default_factory=dict)

    def recall(
        self, frame: int, memories: int, most_given: int, pointers: int
    ) -> tuple[list[Any], list[Any]]:
        """([(age for the table, memory)], [(age, memory) of pointers]) for a frame. Ages of given masks are 0."""
        near = dict(self.given)
        if 0 <= most_given < len(near):
            before = [max((t for t in near if t < frame), default=None)]
            after = [min((t for t in near if t >= frame), default=None)]
            chosen = [t for t in (*before, *after) if t is not None]
            rest = sorted((t for t in near if t not in chosen), key=lambda t: abs(t - frame))
            near = {t: near[t] for t in (*chosen, *rest[: max(most_given - len(chosen), 0)])}
        found = [(0, memory) for memory in near.values()]
        left = {t: m for t, m in self.given.items() if t not in near}
        for age in range(memories - 1, 0, -1):
            memory = self.others.get(frame - age, left.get(frame - age))
            if memory is not None:
                found.append((age, memory))
        pointed = [(frame - t, memory) for t, memory in self.given.items() if t <= frame]
        for age in range(1, min(pointers, frame + 1)):
            if frame - age in self.others:
                pointed.append((age, self.others[frame - age]))
        return found, pointed

    def forget(self, frame: int, memories: int, pointers: int) -> None:
        """Drop memories that no later frame reads."""
        for old in [t for t in self.others if t <= frame - max(memories, pointers)]:
            del self.others[old]


class Sam3Clip(Clip):
    """The objects of a clip of `frames` frames, for prompts whose numbers are 0, 1, ..."""

    def __init__(self, model: Sam3VideoModel, frames: int) -> None:
        self.model, self.tracker, self.rules = model, model.tracker_model, model.rules
        self.frame, self.frames, self.born = 0, frames, 0
        self.history = tracks.History(self.rules)
        self.tracks: list[Track] = []
        self.prompt_of: dict[int, int] = {}
        self.hidden_at: dict[int, int] = {}  # {track: the last frame in which it was hidden, or -1}
        self._made: list[FrameObjects] = []

    def advance(self, seen: Seen, found: Found) -> None:
        rules, frame = self.rules, self.frame
        detected = self._detections(found)
        moved = self._propagate(seen)
        masks = tracks.without_specks(moved.masks, rules.fill_hole_area)
        own = list(self.tracks)
        numbers, prompts = [t.number for t in own], [t.prompt for t in own]
        matched = tracks.match(detected, masks, numbers, prompts, rules)
        matched.new = self._limited(matched.new, detected.scores)
        born = [
            Track(self.born + i, detected.prompts[d], float(detected.scores[d]))
            for i, d in enumerate(matched.new)
        ]
        self.born += len(born)
        self.prompt_of |= {t.number: t.prompt for t in born}
        wrong, hidden = self.history.add(frame, matched, [t.number for t in born])
        confirmed = self._confirmed(matched, moved.scores)
        shown = masks
        if own:
            shown = self._hide(masks, numbers, prompts, wrong)
            self._remember(seen, moved, shown, prompts, confirmed, detected)
        if born:
            self._enter(seen, moved, born, detected.masks[matched.new], confirmed)
        fresh = tracks.without_specks(detected.masks[matched.new], rules.fill_hole_area)
        scores = [*moved.scores.sigmoid().tolist(), *(t.score for t in born)]
        for number, detection in confirmed.items():
            shown[numbers.index(number)] = detected.masks[detection]
        self._made.append(
            FrameObjects(
                [*numbers, *(t.number for t in born)], torch.cat((shown, fresh)), scores,
                [t.score for t in (*own, *born)], [t.prompt for t in (*own, *born)], hidden,
            )
        )  # fmt: skip
        self.tracks = [t for t in (*own, *born) if t.number not in wrong]
        limits = self.tracker.config.num_maskmem, self._pointers
        for track in self.tracks:
            track.forget(frame, *limits)
        for number in wrong:
            self.hidden_at.pop(number, None)
        self.frame += 1

    def result(self) -> list[FrameObjects]:
        gone = self.history.removed
        for made in self._made:
            made.hidden |= gone
        return self._made

    @property
    def _pointers(self) -> int:
        return min(self.frames, self.tracker.config.max_object_pointers_in_encoder)

    def _detections(self, found: Found) -> tracks.Detections:
        rules, scores = self.rules, found.scores
        good, masks, kept, prompts = scores > rules.score_threshold_detection, [], [], []
        for prompt, row in enumerate(good):
            places = row.nonzero().flatten()
            own = found.masks[prompt, places].float()
            if rules.det_nms_thresh > 0 and len(places):
                best = tracks.distinct(own > 0, scores[prompt, places], rules.det_nms_thresh)
                stay = torch.from_numpy(best).to(places.device)
                places, own = places[stay], own[stay]
            masks.append(own)
            kept.append(scores[prompt, places])
            prompts += [prompt] * len(places)
        return tracks.Detections(torch.cat(masks), torch.cat(kept).cpu().numpy(), prompts)

    def _limited(self, new: list[int], scores: np.ndarray) -> list[int]:
        """The best of the new detections, as many as the model may follow."""
        room = max(self.rules.max_num_objects - len(self.tracks), 0)
        if len(new) <= room:
            return new
        return sorted(new, key=lambda d: -scores[d])[:room]

    def _propagate(self, seen: Seen) -> Decided:
        """The masks of all tracks in this frame; objects with equal ages of memories run together."""
        tracker, config, width = self.tracker, self.tracker.config, seen.cells.shape[2]
        side, splits = tracker.side, width // tracker.memory
        same: dict[Any, list[int]] = {}
        recalled = []
        for i, track in enumerate(self.tracks):
            cells, pointed = track.recall(
                self.frame, config.num_maskmem, config.max_cond_frame_num, self._pointers
            )
            recalled.append((cells, pointed))
            key = tuple(age for age, _ in cells), tuple(age for age, _ in pointed)
            same.setdefault(key, []).append(i)
        shape = len(self.tracks), 4 * side, 4 * side
        masks = torch.empty(shape, device=seen.cells.device)
        scores, pointers = masks.new_empty(shape[0]), seen.cells.new_empty(shape[0], width)
        for (ages, distances), listed in same.items():
            spatial = encodings(side, tracker.memory, masks.device, seen.cells.dtype)[0]
            table = tracker.memory_temporal_positional_encoding[:, 0, 0]
            places = torch.cat([spatial + table[age - 1] for age in ages])
            passed = tracker.ages(distances, self._pointers).repeat_interleave(splits, 0)
            places = torch.cat((passed, places))
            for start in range(0, len(listed), AT_ONCE):
                part = listed[start : start + AT_ONCE]
                rows = [
                    torch.cat(
                        (
                            *(m.pointer.view(splits, -1) for _, m in recalled[i][1]),
                            *(m.cells.to(places.dtype) for _, m in recalled[i][0]),
                        )
                    )
                    for i in part
                ]
                memories = torch.stack(rows)
                found = tracker.propagate(seen, memories, memories + places, len(distances) * splits)
                masks[part], scores[part], pointers[part] = found
        return Decided(masks, scores, pointers)

    def _confirmed(self, matched: tracks.Match, scores: T) -> dict[int, int]:
        """{track: detection} of those whose memory the detector confirms in this frame."""
        every = self.rules.recondition_every_nth_frame
        if every <= 0 or self.frame % every or not matched.sure:
            return {}
        sure = dict(zip((t.number for t in self.tracks), scores.tolist(), strict=True))
        return {n: d for n, d in matched.sure.items() if sure[n] > self.rules.high_conf_thresh}

    def _hide(self, masks: T, numbers: list[int], prompts: list[int], wrong: set[int]) -> T:
        """The masks without tracks that lie on another one."""
        most = self.rules.suppress_overlapping_based_on_recent_occlusion_threshold
        masks = masks.clone()
        if most <= 0:
            return masks
        last = {n: self.hidden_at.get(n, 100000 if n in wrong else -1) for n in numbers}
        inside = masks > 0
        covered = tracks.covered_lately(inside, last, prompts, numbers, most)
        empty = (~inside.flatten(1).any(1)).tolist()
        gone = [a or b for a, b in zip(covered, empty, strict=True)]
        self.hidden_at = {n: self.frame if g else last[n] for n, g in zip(numbers, gone, strict=True)}
        masks[torch.tensor(covered, device=masks.device)] = tracks.OUTSIDE
        return masks

    def _remember(
        self, seen: Seen, moved: Decided, shown: T, prompts: list[int], confirmed: dict[int, int],
        detected: tracks.Detections,
    ) -> None:  # fmt: skip
        """Keep what this frame has shown of the tracks."""
        masks = shown.clone()
        if not self.rules.recondition_on_trk_masks:
            for i, track in enumerate(self.tracks):
                if track.number in confirmed:
                    masks[i] = (detected.masks[confirmed[track.number]] >= 0.5).float()
        masks = tracks.apart(masks, prompts)
        there = torch.where((masks > 0).flatten(1).any(1), SURE, -SURE)
        memories = self._encoded(seen, masks[:, None], there, False)
        for i, track in enumerate(self.tracks):
            kept = track.given if track.number in confirmed else track.others
            kept[self.frame] = Memory(memories[i], moved.pointers[i])

    def _enter(
        self, seen: Seen, moved: Decided, born: list[Track], masks: T, confirmed: dict[int, int]
    ) -> None:
        """Keep the masks of new tracks. The memory of the others is that of their whole masks, as in transformers."""
        tracker = self.tracker
        for start in range(0, len(born), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            wide, scores, pointers = tracker.enter(seen, masks[part] >= 0.5)
            memories = tracker.remember(seen, wide, scores, True)
            for i, track in enumerate(born[part]):
                track.given[self.frame] = Memory(memories[i], pointers[i])
        again = [i for i, track in enumerate(self.tracks) if track.number not in confirmed]
        if again:
            size = 2 * (tracker.image_size,)
            wide = F.interpolate(moved.masks[again][:, None], size=size, mode="bilinear")
            memories = self._encoded(seen, wide, moved.scores[again], True)
            for row, i in zip(memories, again, strict=True):
                self.tracks[i].others[self.frame].cells = row

    def _encoded(self, seen: Seen, masks: T, scores: T, hard: bool) -> T:
        parts = zip(masks.split(AT_ONCE), scores.split(AT_ONCE), strict=True)
        return torch.cat([self.tracker.remember(seen, m, s, hard) for m, s in parts])


class Sam3VideoModel(ClipSegmenter, MarkSegmenter):
    """config: transformers.Sam3VideoConfig. Raises Unsupported."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.detector_model = detector = sam3.Sam3Model(config.detector_config)
        check(config)
        self.side, self.patch_size = detector.side, detector.patch_size
        self.text_length, self.vocab_size = detector.text_length, detector.vocab_size
        vision = config.detector_config.vision_config
        self.tracker_neck = sam3.Neck(vision, len(LEVELS) - 1)
        self.tracker_model = Tracker(config.tracker_config, self.side, vision.backbone_config.image_size)
        self.rules = tracks.Rules.of(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.detector_model.dtype

    def see(self, patches: T) -> T:
        return self.detector_model.see(patches)

    def read(self, input_ids: T) -> T:
        return self.detector_model.read(input_ids)

    def segment(
        self, features: T, texts: T, known: T, boxes: T | None = None, labels: T | None = None
    ) -> Found:
        return self.detector_model.segment(features, texts, known, boxes, labels)

    def watch(self, patches: T) -> tuple[T, Seen]:
        encoder = self.detector_model.vision_encoder
        x = encoder.backbone(patches)
        features = [level(x, self.side) for level in encoder.neck.fpn_layers]
        return torch.cat(features, 1), self._levels(x)

    def look(self, patches: T) -> Seen:
        return self._levels(self.detector_model.vision_encoder.backbone(patches))

    def mark(self, seen: Seen, points: T, labels: T, masks: T | None = None) -> Marked:
        return self.tracker_model.mark(seen, points, labels, masks)

    def _levels(self, x: T) -> Seen:
        return self.tracker_model.levels(*(level(x, self.side) for level in self.tracker_neck.fpn_layers))

    def clip(self, frames: int) -> Sam3Clip:
        return Sam3Clip(self, frames)


def unneeded(config: Any) -> list[str]:
    """Patterns of the keys of levels and stages that the model does not read."""
    found = [f"detector_model.{pattern}" for pattern in sam3.unneeded(config.detector_config)]
    return [*found, f"tracker_neck.fpn_layers.{len(LEVELS) - 1}.*"]


ARCH = Architecture(
    names=("Sam3VideoModel",),
    category="vision",
    model="Sam3VideoModel",
    runner="Encode",
    model_type="sam3_video",
    inputs="images",
    packed={"qkv": ("q_of_all", "k_of_all", "v_of_all"), "qk_proj": ("q_of_self", "k_of_self")},
    prefixes={"tracker_model.tracker_model.": "tracker_model."},  # as transformers 5 saves it
    parts={
        "attention.q_proj": "attention.q_of_all",
        "attention.k_proj": "attention.k_of_all",
        "attention.v_proj": "attention.v_of_all",
        "self_attn.q_proj": "self_attn.q_of_self",
        "self_attn.k_proj": "self_attn.k_of_self",
        "self_attn.out_proj": "self_attn.o_proj",
    },
    unneeded="fastkernels.models.vision.sam3_video:unneeded",
    unused=(
        "detector_model.text_encoder.text_projection.weight", "*.position_ids", "tracker_model.no_memory_*",
        "tracker_model.vision_encoder.*",
    ),
)  # fmt: skip
