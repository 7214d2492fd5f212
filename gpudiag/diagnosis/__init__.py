"""Rules: schema, loader, expressions, engine, self-test."""

from gpudiag.diagnosis.engine import Judgement as Judgement
from gpudiag.diagnosis.engine import judge as judge
from gpudiag.diagnosis.loader import load_rules as load_rules
from gpudiag.diagnosis.selftest import self_test as self_test
