"""`gpudiag schema experiments`."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import outcomes as made

from gpudiag.model.experiment import ExperimentData


def test_the_schema_accepts_what_is_written(command) -> None:
    result = command("schema", "experiments")
    assert result.code == 0
    schema = json.loads(result.out)
    jsonschema.Draft202012Validator.check_schema(schema)
    for data in (made.experiments(), ExperimentData()):
        jsonschema.validate(json.loads(msgspec.json.encode(data)), schema, cls=jsonschema.Draft202012Validator)
