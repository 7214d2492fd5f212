"""Documented numbers that rules compare: each with a unit, a source, and a reason where it is missing."""

from gpudiag.facts.values import CATALOGUE as CATALOGUE
from gpudiag.facts.values import Facts as Facts
