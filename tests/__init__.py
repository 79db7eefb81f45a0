"""All tests. CONTRIBUTING.md has the map of the folders, docs/reliability.md what each of them shows."""
