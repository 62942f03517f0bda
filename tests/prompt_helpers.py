"""Small tokenizers as checkpoints carry them, made on the spot."""

import json
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from conftest import IMAGES
from moonvit.cli import group
from moonvit.encoder import Encoder
from moonvit.prompt import Image, PromptFormat, Turn
from moonvit.prompt.embeds import PromptBuilder, PromptEmbeds, encode_media, question
from moonvit.weights.checkpoint import LocalCheckpoint

PHOTO = str(IMAGES / "photo_130x80.jpg")
WIDE = str(IMAGES / "rgb_300x200.png")

WORDS = [
    "th",
    "the",
    " the",
    "im",
    "image",
    "ser",
    "user",
    "is",
    " is",
    "What",
    "\n\n",
    "00",
    "</",
    "s>",
    "me",
]
KIMI_MARKS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_begin|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
]
QWEN_MARKS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens of Qwen's that are not special."""


def kimi_files(marks: list[str] | None = None) -> dict[str, bytes]:
    """`tiktoken.model` of all bytes and a few words, and the `tokenizer_config.json` that names markers."""
    tokens = [bytes([n]) for n in range(256)] + [word.encode() for word in WORDS]
    model = b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    named = {str(len(tokens) + n): {"content": mark} for n, mark in enumerate(marks or KIMI_MARKS)}
    config = {"added_tokens_decoder": named, "tokenizer_class": "TikTokenTokenizer"}
    return {"tiktoken.model": model, "tokenizer_config.json": json.dumps(config).encode()}


def kimi_id(mark: str) -> int:
    return 256 + len(WORDS) + KIMI_MARKS.index(mark)


def qwen_tokenizer() -> Any:
    """A byte-level BPE with Qwen2's way of splitting, and its markers."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("i", "s"),
        ("Ċ", "Ċ"),
        ("u", "s"),
        ("e", "r"),
        ("us", "er"),
    ]
    words = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in QWEN_MARKS])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in QWEN_WORDS])
    return tokenizer


def qwen_files() -> dict[str, bytes]:
    return {"tokenizer.json": qwen_tokenizer().to_str().encode()}


@dataclass
class Folder:
    """Small files in memory, as `PromptFormat.open` takes them."""

    files: dict[str, bytes]
    config: dict[str, Any] = field(default_factory=dict)
    where: str = "model"

    def file_names(self) -> list[str]:
        return list(self.files)

    def small_file(self, name: str, limit: int) -> bytes:
        assert len(self.files[name]) <= limit
        return self.files[name]


def open_format(family: str, config: dict[str, Any] | None = None) -> PromptFormat:
    files = qwen_files() if family.startswith("qwen") else kimi_files()
    return PromptFormat.open(Folder(files, config or {}), family)


def write_tokenizer(directory: Path, family: str) -> None:
    """The files of a small tokenizer put into a checkpoint's directory."""
    for name, data in (qwen_files() if family.startswith("qwen") else kimi_files()).items():
        (directory / name).write_bytes(data)


def text_table(directory: Path) -> Tensor:
    """The text embedding of a checkpoint in a directory, whole."""
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))


def run(*words: object) -> Result:
    """`moonvit prompt` in this process."""
    return CliRunner().invoke(group, ["prompt", *map(str, words)], catch_exceptions=True)


def build(directory: Path, sources: list[str]) -> tuple[Encoder, PromptBuilder, PromptEmbeds]:
    """A question about pictures as the library makes it, in float32."""
    encoder = Encoder.from_pretrained(directory, dtype="float32")
    builder = PromptBuilder(LocalCheckpoint(directory))
    media = encode_media(encoder, sources)
    prompt = builder.format.encode(question("What is this?", [medium.part for medium in media]))
    return encoder, builder, builder.embed(prompt, media)


def messages(turns: list[Turn]) -> list[dict[str, Any]]:
    """The turns as transformers' templates and K3's own encoding take them."""
    found = []
    for turn in turns:
        content = []
        for part in turn.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "image" if isinstance(part, Image) else "video"})
        message: dict[str, Any] = {"role": turn.role, "content": content}
        if turn.name:
            message["tool" if turn.role == "tool" else "name"] = turn.name
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in turn.tool_calls
            ]
        if turn.tool_call_id:
            message["tool_call_id"] = turn.tool_call_id
        found.append(message)
    return found
