"""What the weights must be, bit by bit, and how that is told."""

import hashlib

import torch

TINY_SHA256 = {
    "tiny-llama": "9c18f35403fda538864b23655d4a5061ff6808f9a53cf2be55ecefa59b4feabd",
    "tiny-gpt2": "93add6a0beb4f15c00459c14c9274a228be795bf4885c4ea25cf3996d5d57dd2",
    "tiny-qwen3": "bab7597bb104a5dd8d0398e4ea483313545a3cb43dd7592aa2cb6eb63f2a2a09",
    "tiny-gemma3": "702b60ae55d16bc531617e54c2a9700c80c603e8aa508217f262b99964c2b0b2",
    "tiny-qwen3-moe": "6579458e94f4f5c15e9340267c9f62dde5c42c9db98897d6b24e38a7f1b64d23",
    "tiny-mixtral": "9bc213ce1ba1affda562b084d094e82a8d68fe0471a8dfd3717dd30899ff8154",
}
# Of the float32 SmolLM2 that the pinned GGUF file is dequantized to.
SMOLLM2_SHA256 = "908d00480351233b0c3feda0c3b31bd6cdccda9c2492078fabfa153db7164b0c"


def digest(model):
    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def is_bitwise_equal(actual, expected):
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (actual, expected)))
