"""The contents of an evaluation: its figures against the manifest, and its sums."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from eagle3 import strict_json
from eagle3.acceptance import Figures
from eagle3.evaluation import facts_of
from eagle3.verification.contents import Check, Contents

_FIGURES_NAME, _REPORT_NAME = "acceptance.json", "report.html"


class _Prompt(msgspec.Struct, frozen=True):
    drafts: int
    accepted: tuple[int, ...]
    tokens: int


class _Prompts(msgspec.Struct, frozen=True):
    prompts: tuple[_Prompt, ...]


class FiguresContents(Contents):
    """`acceptance.json` and the report."""

    def whole(self) -> Iterable[Check]:
        """The manifest's facts are those of the figures; the figures add up over the prompts."""
        data = self.artifact.read(_FIGURES_NAME)
        try:
            figures = strict_json.decode(data, Figures)
            prompts = strict_json.decode(data, _Prompts).prompts
        except msgspec.DecodeError as error:
            raise self.differs(_FIGURES_NAME, "the figures of an evaluation", error) from error
        facts = self.artifact.manifest.facts
        for name, value in msgspec.to_builtins(facts_of(figures)).items():
            yield partial(self.says, f"facts.{name}", value, facts.get(name))
        yield lambda: self._check_sums(figures, prompts)
        yield self._check_report

    def _check_sums(self, figures: Figures, prompts: tuple[_Prompt, ...]) -> None:
        trained = figures.trained
        counted = {
            "prompts": (len(prompts), figures.heldout_prompts),
            "drafts": (sum(prompt.drafts for prompt in prompts), trained.drafts),
            "accepted": (sum(sum(prompt.accepted) for prompt in prompts), trained.accepted),
            "tokens": (sum(prompt.tokens for prompt in prompts), trained.tokens),
        }
        for name, (counted_again, told) in counted.items():
            if counted_again != told:
                where = f"{_FIGURES_NAME}: trained.{name}"
                raise self.differs(where, f"{counted_again}, as counted again", told)

    def _check_report(self) -> None:
        if not self.artifact.read(_REPORT_NAME).rstrip().endswith(b"</html>"):
            raise self.differs(_REPORT_NAME, "a whole page", "another end than </html>")


CONTENTS = {"evaluate": FiguresContents}
