"""The core types: frozen records and the schema of every table. Imports nothing from the layers above."""
