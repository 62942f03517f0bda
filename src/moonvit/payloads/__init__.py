"""What engines take in place of pictures; see docs/engines.md for which engine takes what.

Shapes are checked before anything is written. vLLM reads tensors as `torch.save` writes them, a zip archive
with a pickle inside; that is written here for it, and never read.
"""

from moonvit.payloads.plain import write_plain
from moonvit.payloads.sglang import sglang_image, write_sglang
from moonvit.payloads.shapes import PAYLOADS, check_payload
from moonvit.payloads.vllm import vllm_images, vllm_prompt, write_vllm_images, write_vllm_prompt

__all__ = [
    "PAYLOADS",
    "check_payload",
    "sglang_image",
    "vllm_images",
    "vllm_prompt",
    "write_plain",
    "write_sglang",
    "write_vllm_images",
    "write_vllm_prompt",
]
