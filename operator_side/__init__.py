"""The tools that a person runs: `holdfast run`, `cluster`, `drill`, `doctor`, `report`, `status` and the rest."""
