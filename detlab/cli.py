"""The ``detlab`` command: the library's words in a terminal.

Exit code 0: it holds (identical); 1: it does not; 2: bad usage; 3: it could not be tested; 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detlab.errors import DetlabError, MachineError, UsageError

HOLDS, DOES_NOT, USAGE, UNTESTED, INTERRUPTED = 0, 1, 2, 3, 130
_ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    # OpenMP threads that spin beside another busy process cost far more than they save; torch is not imported yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except UsageError as error:
        print(f"detlab: {error}", file=sys.stderr)
        return USAGE
    except DetlabError as error:
        print(f"detlab: {error}", file=sys.stderr)
        return UNTESTED
    except KeyboardInterrupt:
        print("\ndetlab: interrupted; nothing was saved.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HOLDS
    except Exception:  # Python's own exit code for it, 1, would say that the bits differ
        traceback.print_exc()
        print("detlab: an unexpected error; it could not be tested. Please report it with the lines above.", file=sys.stderr)
        return UNTESTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="detlab",
        description="Finds where two runs of a language model stop being bit-identical.",
        epilog="Exit code: 0 it holds, 1 it does not, 2 bad usage, 3 could not be tested.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    investigate = commands.add_parser("investigate", help="run two conditions and find where they part")
    investigate.add_argument("--model", required=True, help="smollm2-135m, tiny-llama, a folder or a hub id")
    investigate.add_argument("--a", default="", metavar="CONDITION", help='such as "batch_size=1" (the default)')
    investigate.add_argument("--b", required=True, metavar="CONDITION", help='such as "batch_size=8,padding_side=left"')
    investigate.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16, float64")
    investigate.add_argument("--prompts", metavar="FILE", help="JSONL or text; default: detlab's own assistant prompts")
    investigate.add_argument("--limit", type=_positive, metavar="N", help="use the first N prompts only")
    investigate.add_argument("--new-tokens", type=_count, default=8, metavar="N", help="tokens to decode (default 8)")
    investigate.add_argument("--report", metavar="FILE", help="also write a stand-alone HTML report")
    investigate.add_argument("--save", metavar="FOLDER", help="also save both runs, as FOLDER/a and FOLDER/b")
    investigate.add_argument("--json", action="store_true", help="print JSON")
    investigate.set_defaults(run=_investigate)

    compare = commands.add_parser("compare", help="compare two saved runs or traces")
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(run=_compare)

    verify = commands.add_parser("verify", help="prove a tier: serve prompts in many ways and compare the bits")
    verify.add_argument("--model", help="smollm2-135m, tiny-llama, a folder or a hub id")
    verify.add_argument("--certificate", metavar="FILE", help="run again what a certificate names, and compare the digests")
    verify.add_argument("--tier", help="default: invariant")
    verify.add_argument("--axes", metavar="A,B", help="such as batch,padding; default: all that the tier promises")
    verify.add_argument("--trials", type=_positive, metavar="N", help="comparisons for each axis (default 6)")
    verify.add_argument("--dtype", help="float32 (default), bfloat16, float16")
    verify.add_argument("--prompts", metavar="FILE", help="JSONL or text; default: four of detlab's own assistant prompts")
    verify.add_argument("--new-tokens", type=_positive, metavar="N", help="tokens to decode (default 4)")
    verify.add_argument("--seed", type=_count, metavar="N", help="of what is drawn (default 0)")
    verify.add_argument("--save", metavar="FILE", help="also write the certificate, as .json or as a page, .html")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)

    coverage = commands.add_parser("coverage", help="say of every op of a model whether a tier makes its bits safe")
    coverage.add_argument("--model", required=True, help="smollm2-135m, tiny-llama, a folder or a hub id")
    coverage.add_argument("--tier", default="invariant", help="default: invariant")
    coverage.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16")
    coverage.add_argument("--json", action="store_true", help="print JSON")
    coverage.set_defaults(run=_coverage)

    rate = commands.add_parser("rate", help="count the answers that part when conditions change, before and after a remedy")
    rate.add_argument("--model", required=True, help="smollm2-135m, tiny-llama, a folder or a hub id")
    rate.add_argument("--condition", action="append", metavar="CONDITION",
                      help=f"one to draw from; the first is the reference; default: {' | '.join(_MIXED)}")  # fmt: skip
    rate.add_argument("--runs", type=_positive, default=100, metavar="N", help="how many (default 100)")
    rate.add_argument("--remedy", metavar="NAME", help="also with this one, such as tier-invariant, or several joined by +")
    rate.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16, float64")
    rate.add_argument("--prompts", metavar="FILE", help="JSONL or text; default: four of detlab's own assistant prompts")
    rate.add_argument("--new-tokens", type=_count, default=8, metavar="N", help="tokens to decode (default 8)")
    rate.add_argument("--seed", type=_count, default=0, metavar="N", help="of what is drawn (default 0)")
    rate.add_argument("--json", action="store_true", help="print JSON, with the MD5 of every answer")
    rate.set_defaults(run=_rate)

    bench = commands.add_parser("bench", help="time a tier against the stock model, interleaved in one process")
    bench.add_argument("--model", required=True, help="smollm2-135m, tiny-llama, a folder or a hub id")
    bench.add_argument("--tier", default="invariant", help="default: invariant")
    bench.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16")
    bench.add_argument("--threads", type=_positive, metavar="N", help="intra-op threads; default: the process's")
    bench.add_argument("--batch-sizes", type=_numbers, default=(1, 8, 32), metavar="N,N", help="of decode (default 1,8,32)")
    bench.add_argument("--contexts", type=_numbers, default=(100,), metavar="N,N", help="tokens in the cache (default 100)")
    bench.add_argument("--prefills", type=_numbers, default=(64, 512, 2048), metavar="N,N", help="default 64,512,2048")
    bench.add_argument("--padded", action="store_true", help="also a ragged, left-padded batch")
    bench.add_argument("--parts", action="store_true", help="also single parts of the tier, and its padding off")
    bench.add_argument("--seconds", type=float, default=4.0, metavar="S", help="for each workload (default 4)")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.set_defaults(run=_bench)

    environment = commands.add_parser("environment", help="print this machine's record")
    environment.add_argument("--json", action="store_true", help="print JSON")
    environment.set_defaults(run=_environment)

    demo = commands.add_parser("demo", help="the start notebook's investigation in the terminal, with a report")
    demo.add_argument("--model", default="smollm2-135m", help="default: smollm2-135m")
    demo.add_argument("--report", default="report.html", metavar="FILE", help="default: report.html")
    demo.set_defaults(run=_demo)

    lab = commands.add_parser("lab", help="open JupyterLab on the start notebook")
    lab.add_argument("jupyter", nargs="*", metavar="-- OPTION", help="options for JupyterLab, after --")
    lab.set_defaults(run=_lab)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"give a number of at least 0, not {text}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"give a number of at least 1, not {text}")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


_numbers.__name__ = "list of numbers"
_count.__name__ = _positive.__name__ = "number"  # argparse names them in its messages


class _ProgressLine:
    """Reports on stderr what takes longer than two seconds."""

    def __init__(self) -> None:
        self.started = self.shown = time.monotonic()
        self.is_terminal = sys.stderr.isatty()
        self.is_open = False

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        pause = 0.2 if self.is_terminal else 10.0
        if now - self.started < 2 or now - self.shown < pause:
            return
        self.shown = now
        text = f"{what}: call {done} of {total}"
        if self.is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self.is_open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.is_open = False


def _print(result: Any, as_json: bool) -> None:
    """Prints a result; a reader that went away (``| head``) changes neither the exit code nor what is still to be saved."""
    try:
        if as_json:
            print(json.dumps(result.to_json(), ensure_ascii=False), flush=True)
        else:  # a prompt's name must not speak to the terminal
            text = "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in str(result))
            print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_prompts() -> Path:
    path = _ROOT / "data" / "prompts" / "assistant.jsonl"
    if not path.is_file():
        raise UsageError("detlab's own prompts are not beside the package (this is no checkout); give --prompts FILE.")
    return path


def _investigate(options: argparse.Namespace) -> int:
    from detlab.condition import Condition
    from detlab.prompts import load_prompts

    # Everything that can be wrong is looked at before the model is loaded.
    conditions = [Condition.parse(text) for text in (options.a, options.b)]
    prompts = load_prompts(options.prompts or _own_prompts())[: options.limit]
    result = _run_investigation(options.model, options.dtype, prompts, conditions, options.new_tokens)
    # Printed first: a file that cannot be written must not cost the result.
    _print(result, options.json)
    if options.save:
        result.a.save(Path(options.save) / "a")
        result.b.save(Path(options.save) / "b")
    if options.report:
        from detlab.viz import write_report

        write_report(result, options.report)
    return HOLDS if result.verdict == "identical" else DOES_NOT


def _run_investigation(name: str, dtype: str, prompts: Any, conditions: Any, new_tokens: int) -> Any:
    from detlab.investigate import investigate
    from detlab.models import load_model

    model, _ = load_model(name, dtype=dtype)
    line = _ProgressLine()
    try:
        return investigate(model, prompts, *conditions, new_tokens=new_tokens, progress=line)
    finally:
        line.close()


def _compare(options: argparse.Namespace) -> int:
    from detlab.divergence.compare import compare
    from detlab.runner import load_trace

    result = compare(load_trace(options.a), load_trace(options.b))
    _print(result, options.json)
    return HOLDS if result.verdict == "identical" else DOES_NOT


def _verify(options: argparse.Namespace) -> int:
    if options.certificate is None and options.model is None:
        raise UsageError("verify needs a model: --model smollm2-135m, or --certificate FILE, which names one.")
    line = _ProgressLine()
    try:
        result = (_verified if options.certificate is None else _verified_again)(options, line)
    finally:
        line.close()
    _print(result, options.json)
    if options.save:
        getattr(result, "found", result).save(options.save)
    return HOLDS if result.holds else DOES_NOT if result.is_refuted else UNTESTED


def _axes(options: argparse.Namespace) -> list[str] | None:
    return None if options.axes is None else [name.strip() for name in options.axes.split(",") if name.strip()]


def _verified(options: argparse.Namespace, line: _ProgressLine) -> Any:
    from detlab.models import load_model
    from detlab.prompts import load_prompts
    from detlab.verify import verify
    from detlab.verify.entry import check_axes

    # Everything that can be wrong is looked at before the model is loaded.
    tier = options.tier or "invariant"
    axes = check_axes(_axes(options), tier)
    prompts = load_prompts(options.prompts) if options.prompts else load_prompts(_own_prompts())[:4]
    given = {name: getattr(options, name) for name in ("trials", "seed", "new_tokens") if getattr(options, name) is not None}
    model, _ = load_model(options.model, dtype=options.dtype or "float32")
    return verify(model, prompts, tier, axes, **given, progress=line)


def _verified_again(options: argparse.Namespace, line: _ProgressLine) -> Any:
    from detlab.models import load_model
    from detlab.verify import Certificate, recheck

    for name in ("tier", "trials", "dtype", "prompts", "new_tokens", "seed"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is the certificate's; beside --certificate give --model or --axes.")
    certificate = Certificate.load(options.certificate)
    model = load_model(options.model, dtype=certificate.model["dtype"])[0] if options.model is not None else None
    return recheck(certificate, model, axes=_axes(options), progress=line)


def _coverage(options: argparse.Namespace) -> int:
    from detlab.coverage import coverage
    from detlab.models import load_model

    model, _ = load_model(options.model, dtype=options.dtype)
    result = coverage(model, options.tier)
    _print(result, options.json)
    return HOLDS if result.holds else DOES_NOT


_MIXED = ("default", "batch_size=4", "batch_size=8,padding_side=left")


def _rate(options: argparse.Namespace) -> int:
    from detlab.condition import Condition
    from detlab.models import load_model
    from detlab.prompts import load_prompts
    from detlab.remedies import rate
    from detlab.remedies.rates import BeforeAfter
    from detlab.remedies.registry import plan_of

    # Everything that can be wrong is looked at before the model is loaded.
    conditions = [Condition.parse(text) for text in options.condition or _MIXED]
    plan = plan_of(options.remedy) if options.remedy is not None else None
    prompts = load_prompts(options.prompts) if options.prompts else load_prompts(_own_prompts())[:4]
    model, _ = load_model(options.model, dtype=options.dtype)
    if plan is not None and (why := plan.reason(model)):
        raise MachineError(f"the remedy {plan.name!r} cannot be had here: {why}.")
    line = _ProgressLine()
    try:
        before, *after = (
            rate(model, prompts, conditions, options.runs, remedy, options.seed, new_tokens=options.new_tokens, progress=line)
            for remedy in ([None] if plan is None else [None, plan.name])
        )
    finally:
        line.close()
    result = BeforeAfter(before, after[0] if after else None)
    _print(result, options.json)
    return HOLDS if result.holds else DOES_NOT


def _bench(options: argparse.Namespace) -> int:
    import torch

    from detlab.bench import bench
    from detlab.models import load_model

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, _ = load_model(options.model, dtype=options.dtype)
    line = _ProgressLine()
    try:
        result = bench(model, options.tier, batch_sizes=options.batch_sizes, contexts=options.contexts,
                       prefills=options.prefills, padded=options.padded, parts=options.parts, seconds=options.seconds,
                       progress=line)  # fmt: skip
    finally:
        line.close()
    _print(result, options.json)
    return HOLDS


def _environment(options: argparse.Namespace) -> int:
    from detlab.environment import environment

    record = environment()
    print(json.dumps(record.to_json(), ensure_ascii=False) if options.json else record)
    return HOLDS


def _demo(options: argparse.Namespace) -> int:
    from detlab.condition import Condition
    from detlab.prompts import load_prompts
    from detlab.viz import write_report

    prompts = load_prompts(_own_prompts())[:6]
    alone, together = Condition(), Condition(batch_size=6, padding_side="left")
    print(f"{options.model} in bfloat16 answers {len(prompts)} prompts: each alone, then all in one left-padded batch.")
    result = _run_investigation(options.model, "bfloat16", prompts, [alone, together], 6)
    print(result)
    for flip in result.comparison.token_flips:
        for run in (result.a, result.b):
            print(f"  {flip.prompt_id} [{run.condition}]: {run.texts[flip.prompt] if run.texts else ''!r}")
    print(f"report: {write_report(result, options.report)}")
    return HOLDS


def _lab(options: argparse.Namespace) -> int:
    notebook = _ROOT / "notebooks" / "00-start-here.ipynb"
    if not notebook.is_file():
        raise UsageError("the notebooks are not beside the package; run `detlab lab` from a checkout of detlab.")
    command = [
        sys.executable, "-m", "jupyterlab", str(notebook), "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={_ROOT}", "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(sys.executable, [*command, *options.jupyter])
