"""Work units: cutting an input into them, sharing them out, and merging what they left behind.

A unit is cut from the input alone (its manifest, and where a limit asks for them the lengths of
its rows), so every worker and every restart cuts the same ones and names its objects the same
way. Merging is a pure function of the unit records: whoever sees the last unit done may do it,
and any number of workers doing it get the same manifest.
"""

from eagle3.units.cutting import Span, Unit, cut_units, longest_row, row_lengths
from eagle3.units.merging import merge, merge_token_counts
from eagle3.units.walking import UnitReader, open_units, walk_units
from eagle3.units.writing import Writers, WrittenUnit, adopt_unit, write_unit

__all__ = [
    "Span",
    "Unit",
    "UnitReader",
    "Writers",
    "WrittenUnit",
    "adopt_unit",
    "cut_units",
    "longest_row",
    "merge",
    "merge_token_counts",
    "open_units",
    "row_lengths",
    "walk_units",
    "write_unit",
]
