"""Serves models in a process of its own, whose variables choose the instruction sets: prints one JSON object of MD5s."""

import hashlib
import json
import sys

import torch

import detlab
from detlab.engine import session
from detlab.engine.exact import compiled, functions, linear, machine, norms
from detlab.engine.exact.split import SplitLinear
from detlab.verify.serve import Way, logits_of

TEXT = [(index * 7919 + 11) % 250 for index in range(40)]
WAYS = (
    Way(), Way(batch=4, rows=(2,), mates=1), Way(left=5), Way(chunk=7, cache="dynamic"), Way(start=36, cache="dynamic"),
)  # fmt: skip


def md5(*tensors):
    found = hashlib.md5()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32).float() / 2**16


def split(x, weight, parts, seed):
    """A product whose terms are dealt out in parts, which are added in another order."""
    pieces = list(torch.arange(x.shape[1]).chunk(parts))
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    return SplitLinear(linear.prepare(weight), None, [pieces[index] for index in order], machine.choose_kernel())(x)


def main(names):
    kernel = machine.choose_kernel()
    found = {"kernel": kernel, "compiled": compiled.serves(torch.ones(1))}
    found |= {"isa": torch.backends.cpu.get_cpu_capability(), "exact": {}, "stock": {}}
    x, weight = drawn(9, 300, seed=1) * 40, drawn(50, 300, seed=2)
    x[3] *= 1e-30
    found["parts"] = sorted({md5(split(x, weight, parts, seed)) for parts in (1, 2, 4, 7) for seed in (1, 2)})
    found["functions"] = {name: md5(functions.evaluate(name, x)) for name in functions.FUNCTIONS}
    small = torch.cat([x * 2.0**-118, x * 2.0**-126, x])
    halves = [linear.rounded(small.double(), dtype) for dtype in (torch.bfloat16, torch.float16)]
    found["functions"]["to 16 bits"] = md5(*halves)
    found["functions"]["norms"] = md5(norms.rms_norm(x, None, 1e-6), norms.layer_norm(x, None, None, 1e-6))
    found["functions"]["softmax"] = md5(functions.softmax(x))
    for name in names:
        name, dtype = name.split(":")
        model = detlab.load_model(name, dtype=dtype)[0]
        key = f"{name}:{dtype}"
        found["stock"][key] = md5(logits_of(model, TEXT, WAYS[-1])[0])
        with session.applied(model, "exact"):
            digests = {md5(logits_of(model, TEXT, way)[0]) for way in WAYS}
            for threads in (2, 3):
                torch.set_num_threads(threads)
                digests |= {md5(logits_of(model, TEXT, way)[0]) for way in WAYS[1::3]}
            torch.set_num_threads(1)
        found["exact"][key] = sorted(digests)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
