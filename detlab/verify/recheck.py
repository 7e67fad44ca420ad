"""Another party's check of a certificate: what it names is run again, here, and the digests are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from detlab.errors import UsageError
from detlab.models import load_model
from detlab.prompts import Prompt
from detlab.verify.certificate import Certificate
from detlab.verify.entry import IN_MEMORY, verify, weights_digests
from detlab.verify.matrix import Progress

__all__ = ["Recheck", "recheck"]


@dataclass(frozen=True)
class Recheck:
    """A certificate beside what this machine found.

    Attributes:
        stated: the certificate.
        found: that of the same prompts, axes and settings, made here.
    """

    stated: Certificate
    found: Certificate

    @property
    def differing(self) -> list[str]:
        """Prompts whose logits have another MD5 here."""
        return [name for name, md5 in self.stated.md5.items() if self.found.md5.get(name) != md5]

    @property
    def is_bound(self) -> bool:
        """Whether the certificate says that this machine's bits are the same: it names a spec, or this machine's rules."""
        return bool(self.stated.spec) or _same_rules(self.stated.class_map, self.found.class_map)

    @property
    def holds(self) -> bool:
        """Whether all digests agree, and the tier holds here, too."""
        return not self.differing and self.found.holds

    @property
    def is_refuted(self) -> bool:
        """Whether a bit differs that the certificate says is the same."""
        return (bool(self.differing) and self.is_bound) or self.found.is_refuted

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        total, wrong = len(self.stated.md5), len(self.differing)
        where = f"made {self.stated.date} on {self.stated.environment.to_json()['cpu'].get('model') or 'a machine of no name'}"
        said = f"{total - wrong} of {total} MD5s are those of the certificate, {where}"
        if wrong:
            said += f"; other bits for {', '.join(self.differing[:5])}"
        if wrong and not self.is_bound:
            said += "; it names no spec, and this machine's kernels have other rules than its own: nothing follows"
        verdict = "confirmed" if self.holds else "refuted" if self.is_refuted else "not confirmed"
        return f"certificate {verdict}: {said}"

    def to_json(self) -> dict[str, Any]:
        """The verdict, the digests of both sides, and this machine's certificate, as JSON values."""
        return {
            "holds": self.holds,
            "is_refuted": self.is_refuted,
            "differing": self.differing,
            "stated": {"md5": self.stated.md5, "spec": self.stated.spec, "date": self.stated.date},
            "found": self.found.to_json(),
        }

    def __str__(self) -> str:
        return f"{self.headline}\n{self.found}"


def _same_rules(stated: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether two records are of one machine's kernels, called by rules that give the same bits.

    A class map grows with the shapes that are asked for, and its times are those of the day: its class is its digest.
    """

    def essence(rule: Any) -> Any:
        return (rule.get("unit"), rule["digest"]) if isinstance(rule, dict) and "digest" in rule else rule

    shared = set(stated) & set(found)
    return stated.get("ledger") == found.get("ledger") and all(essence(stated[name]) == essence(found[name]) for name in shared)


def recheck(certificate: Certificate, model: nn.Module | None = None, *, axes: Sequence[str] | None = None,
            progress: Progress | None = None) -> Recheck:  # fmt: skip
    """Runs again what a certificate names: its model, prompts, axes and settings.

    Args:
        certificate: as `Certificate.load` reads it.
        model: the model; None loads the one that the certificate names.
        axes: some of the certificate's axes; None for all.
        progress: as for `verify`.

    Raises:
        UsageError: the certificate names no model that can be loaded, or the model here has other bits than its own, or an
            axis is none of its axes.
        ModelError: the model is not found here.
    """
    stated = certificate.model
    if axes is not None and not set(axes) <= set(certificate.axes):
        known = ", ".join(certificate.axes)
        raise UsageError(f"the certificate has no axis {', '.join(sorted(set(axes) - set(certificate.axes)))}; it has {known}.")
    if model is None:
        if stated["name"] == IN_MEMORY:
            raise UsageError("the certificate is of a model in memory, which it cannot name; give the model (--model).")
        attention = None if stated["attention"] in ("None", "") else stated["attention"]
        model, _ = load_model(stated["name"], dtype=stated["dtype"], attention=attention)
    for what, digest in weights_digests(model).items():
        if digest != stated[what]:
            kind = what.partition("_")[0]
            raise UsageError(
                f"this is not the certified model: its {kind} have other bits than those of {stated['name']} in "
                f"{stated['dtype']} when the certificate was made (digest {digest[:16]} against {stated[what][:16]}). "
                "Give the same checkpoint in the same dtype, with --model."
            )
    prompts = [Prompt(name, tokens=tuple(tokens)) for name, tokens in certificate.prompts.items()]
    settings = {name: certificate.settings[name] for name in ("trials", "seed", "new_tokens")}
    found = verify(model, prompts, certificate.tier, list(axes or certificate.axes), **settings, progress=progress)
    return Recheck(certificate, found)
