"""Pictures in, the text model's embeddings out."""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moonvit.backends import choose, set_backend
from moonvit.clips import VideoChunk, video_chunks
from moonvit.config import TowerConfig
from moonvit.errors import MoonvitError
from moonvit.families import family_of
from moonvit.pixels.base import PictureProcessor, PixelBatch
from moonvit.pixels.decode import Exif, Layout, Limits
from moonvit.pixels.video import open_video
from moonvit.progress import progress_bar
from moonvit.schedule import batches
from moonvit.towers.base import Features, Tap, VisionModel, check_finite, no_tap
from moonvit.towers.int8 import check_quantize, quantize_model
from moonvit.weights.index import Checkpoint
from moonvit.weights.load import fingerprint, load_weights, tower_only
from moonvit.weights.source import Reporter, find_checkpoint, local_checkpoint

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


class Encoder:
    """A vision tower with its projector and picture processor.

    Attributes:
        model: the `nn.Module`, tower and projector under the checkpoint's names; takes float32 pixels.
        processor: pictures to `PixelBatch`.
        config: geometry, with the norm epsilon in use (`config.norm_eps`).
        checkpoint: where the weights came from, or None.
        backend: how it is run, "eager", "compiled" or "native"; see `optimize`.
        quantize: "int8" where the linear layers are rounded to integers, else None.
        tap: receives every stage of `embed` by name; see `moonvit.trace.record`.
    """

    def __init__(
        self, model: VisionModel, processor: PictureProcessor, checkpoint: Checkpoint | None = None
    ) -> None:
        self.model = model
        self.processor = processor
        self.checkpoint = checkpoint
        self.backend = "eager"
        self.quantize: str | None = None
        self.tap: Tap = no_tap

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        norm_eps: float | None = None,
        backend: str = "auto",
        quantize: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        limits: Limits | None = None,
        report: Reporter | None = None,
    ) -> Self:
        """Load the vision half of a checkpoint; nothing else in it is read or fetched.

        Args:
            path_or_repo: the directory of a checkpoint, a mmproj-*.gguf file of llama.cpp, or a repository
                as "org/name".
            dtype: of the weights and activations: bfloat16, float16, float32 or float64. Weights stored in
                that type are memory-mapped; others are converted.
            device: where the model runs.
            norm_eps: epsilon of the tower's norms, which no checkpoint stores; None is the family's: for K3
                2^-23, float32's own.
            backend: "auto", "eager", "compiled" or "native"; see `optimize`.
            quantize: "int8" rounds the weights of the blocks and the projector to eight bits by output
                channel, and what goes into them by row: faster on a CPU with AVX-512 VNNI, less exact, no
                gradients, bfloat16 and float32 only. See docs/speed.md.
                Such a model's `state_dict` has int8 `weight` and float32 `weight_scale` in their place.
            revision: branch, tag or commit of the repository.
            token: for the hub: a string, True for the saved one, False for none.
            cache_dir: where fetched checkpoints are kept; MOONVIT_CACHE, or `moonvit` in HF_HOME.
            local_files_only: use the cache and no network.
            limits: on pictures, before they are decoded.
            report: told of a fetch and its progress.

        Raises:
            MoonvitError: for a `quantize` that cannot be had here.
            ConfigError: for a missing or nonsensical field.
            WeightsError: for missing or wrong tensors, all in one message.
        """
        dtype, device = as_dtype(dtype), as_device(device)
        check_quantize(quantize, device, dtype)
        directory = find_checkpoint(
            path_or_repo,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            report=report,
        )
        checkpoint = local_checkpoint(directory)
        family = family_of(checkpoint.config, str(directory / "config.json"))
        config, pixels = family.read(checkpoint)
        if norm_eps is not None:
            config = config.with_norm_eps(norm_eps)
        model = family.empty_model(config, projector=not tower_only(checkpoint))
        load_weights(model, checkpoint, dtype)
        if quantize is not None:
            quantize_model(model)
        encoder = cls(model.to(device).eval(), family.processor(pixels, limits), checkpoint)
        encoder.quantize = quantize
        return encoder.optimize(backend)

    def optimize(self, backend: str = "auto") -> Self:
        """Run the model as fast as this machine can, or as asked.

        Weights, names and gradients stay as they are: a pass that records stages or needs gradients runs in
        plain PyTorch whatever the backend.

        Args:
            backend: "eager" is plain PyTorch. "native" uses kernels in C++ (bfloat16 and float32, on a CPU
                with AVX-512 bfloat16 products), compiled once into the cache. "compiled" has PyTorch compile
                the blocks at the first pass. "auto" is native where it can run, else eager.

        Returns:
            The encoder itself. What cannot run here is replaced by "eager" and logged; `backend` tells.

        Raises:
            MoonvitError: for a name that is none, and for "compiled" where the model is rounded to int8.
        """
        chosen = choose(backend, self.device, self.dtype)
        if chosen == "compiled" and self.quantize is not None:
            raise MoonvitError(
                f"backend compiled does not take quantize {self.quantize!r}", "choose native or eager"
            )
        self.backend = chosen
        set_backend(self.model, self.backend)
        return self

    @property
    def family(self) -> str:
        """Which family the tower is of, such as "kimi_k3"; see `moonvit.families`."""
        return self.model.config.model_type

    @property
    def config(self) -> TowerConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @cached_property
    def fingerprint(self) -> str:
        """`sha256:` over the checkpoint's vision tensors; reads them all once."""
        if self.checkpoint is None:
            raise ValueError("this encoder was not loaded from a checkpoint, so it has no fingerprint")
        return fingerprint(self.checkpoint)

    def encode(
        self,
        images: Any,
        *,
        batch_size: int = 16,
        show_progress_bar: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        max_tokens: int | None = None,
        exif: Exif = "apply",
        layout: Layout | None = None,
    ) -> Any:
        """Embeddings of one picture, or of each picture of a list or tuple, in order.

        Args:
            images: paths, bytes, data URLs, PIL images or arrays; see `PictureProcessor`.
            batch_size: pictures packed into one pass at most; large ones are split up further.
            show_progress_bar: on stderr.
            convert_to_numpy: give float32 numpy arrays.
            convert_to_tensor: give torch tensors in the model's dtype on its device; goes before
                convert_to_numpy.
            normalize_embeddings: scale every token to length 1, in float32.
            max_tokens: for each picture, lowers the checkpoint's budget.
            exif: "apply" or "ignore" a picture's orientation.
            layout: "HWC" or "CHW", for arrays of three dimensions.

        Returns:
            [tokens, text_hidden_size] for one picture; a list of such for a list.

        Raises:
            ImageError: for a picture that cannot be used.
            NumericsError: for an overflow in the model's dtype.
        """
        single = not isinstance(images, list | tuple)
        sources = [images] if single else list(images)
        prepared = (
            self.processor.prepare(s, max_tokens=max_tokens, exif=exif, layout=layout) for s in sources
        )
        bar = progress_bar(len(sources), "picture", show_progress_bar)
        results: list[Any] = []
        with bar:
            for group, batch in batches(self.processor, prepared, batch_size):
                for embedding in self.embed(batch):
                    embedding = unit_length(embedding) if normalize_embeddings else embedding
                    results.append(
                        as_numpy(embedding) if convert_to_numpy and not convert_to_tensor else embedding
                    )
                bar.update(len(group))
        return results[0] if single else results

    def embed(self, batch: PixelBatch) -> list[Tensor]:
        """Embeddings of a prepared batch, without gradients; `NumericsError` if any is not finite."""
        return self.features(batch).embeddings

    def features(self, batch: PixelBatch) -> Features:
        """`embed`, with what the family gives beside the embeddings: Qwen3-VL's `deepstack`."""
        with torch.no_grad():
            features = self.model.run(batch.pixel_values.to(self.device), batch.grid_thws, tap=self.tap)
        check_finite(features, self.dtype)
        return features

    def encode_video(
        self,
        video: Any,
        *,
        fps: float | None = None,
        exif: Exif = "apply",
        layout: Layout | None = None,
        max_tokens: int | None = None,
        experimental: bool = False,
    ) -> Iterator[VideoChunk]:
        """The chunks of a video, each with its embeddings and timestamp, as they are computed.

        Args:
            video: the path of a file (needs the extra `video`), or the frames: a list of anything that
                `encode` takes, or one array of four dimensions.
            fps: frames a second of a list of frames.
            exif: "apply" or "ignore" the orientation of the video or its frames.
            layout: of frames that are arrays of three dimensions.
            max_tokens: for each chunk, lowers the checkpoint's budget.
            experimental: K3's own processor takes pictures only; True cuts clips as K2.5 does.

        Raises:
            ImageError: for a broken video.
            MoonvitError: for a family without videos, and where PyAV is not installed.
        """
        opened = open_video(video, fps=fps, limits=self.processor.limits, exif=exif, layout=layout)
        return video_chunks(self, opened, experimental, max_tokens)

    def count_tokens(
        self, image: Any, *, max_tokens: int | None = None, exif: Exif = "apply", layout: Layout | None = None
    ) -> int:
        """Tokens that the picture takes in a prompt, from its header alone."""
        return self.processor.plan(image, max_tokens=max_tokens, exif=exif, layout=layout).tokens


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype by name; `ValueError` for one that a tower does not run in."""
    found = DTYPES.get(_SHORT.get(dtype, dtype).removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise MoonvitError(f"dtype is {dtype!s}, expected one of {', '.join(DTYPES)}")
    return found


def as_device(device: str | torch.device) -> torch.device:
    """The torch device by name; `MoonvitError` for one that is not there."""
    try:
        found = torch.empty(0, device=device).device
        if found.type == "meta":
            raise RuntimeError("holds no numbers")
        return found
    except (RuntimeError, AssertionError) as error:  # torch raises either where a backend is absent
        hint = "cpu always works; moonvit doctor lists the others"
        raise MoonvitError(f"device {device!s} is not there or has no such name", hint) from error


def unit_length(embedding: Tensor) -> Tensor:
    """Every token scaled to length 1, in float32 at least."""
    return F.normalize(embedding.to(torch.promote_types(embedding.dtype, torch.float32)), dim=-1)


def as_numpy(embedding: Tensor) -> NDArray[np.float32]:
    """Float32 numpy, from any device and dtype."""
    return np.asarray(embedding.float().cpu().numpy())
