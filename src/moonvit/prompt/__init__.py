"""Prompts with pictures: parts and turns to ids and slots, by family."""

from moonvit.prompt.format import PromptFormat
from moonvit.prompt.forms import FORMS
from moonvit.prompt.parts import Chunk, Image, Part, Prompt, Slot, ToolCall, Turn, Video

__all__ = ["FORMS", "Chunk", "Image", "Part", "Prompt", "PromptFormat", "Slot", "ToolCall", "Turn", "Video"]
