"""The rule base: `<category>/<id>.yaml`, read as package data."""
