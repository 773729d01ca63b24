"""Communication under way, which somebody has launched and somebody will wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onecopy.company import Company
from onecopy.neighbours import Loan
from onecopy.waiting import Errand


class Pending:
    """Communication under way. It holds its tensors, so that their memory is not reused before."""

    def __init__(
        self,
        company: Company,
        works: Sequence[Any],
        tensors: Sequence[object],
        loans: Sequence[Loan] = (),
        # Of a thread that waits for something else, and then may launch more works.
        errands: Sequence[Errand] = (),
    ) -> None:
        self._company = company
        self._works = works
        self._tensors = tensors
        self._loans = loans
        self._errands = errands

    @classmethod
    def together(cls, pending: Sequence[Pending]) -> Pending:
        """Several as one: the thread that waits goes to sleep and wakes up once."""
        first = pending[0]
        works = [work for each in pending for work in each._works]
        loans = [loan for each in pending for loan in each._loans]
        errands = [errand for each in pending for errand in each._errands]
        return cls(first._company, works, [each._tensors for each in pending], loans, errands)

    def wait(self) -> None:
        """Return once the tensors may be read and written (on accelerators: in stream order)."""
        self._company.wait_for(self._works)
        with self._company.naming_absentees():
            for errand in self._errands:
                self._company.wait_for(errand.wait() or ())
            for loan in self._loans:
                loan.arrive(self._company.patience)
            # Here, where an interruption is final: a letter cannot be read twice.
            self._works = self._tensors = self._loans = self._errands = ()
