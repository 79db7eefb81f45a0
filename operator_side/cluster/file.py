"""The outputs of the Terraform modules (infra/), as `terraform output -json` prints them, checked before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ConfigError

_Text = Annotated[str, Field(min_length=1, max_length=1024)]


class Template(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    id: Annotated[str, Field(pattern=r"lt-[0-9a-f]+")]
    version: _Text


class ClusterFile(BaseModel):
    """Location of a cluster, for which its launch templates were made, and the tags of its machines."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    region: Annotated[str, Field(pattern=r"[a-z]{2}(-[a-z]+)+-\d")]
    availability_zone: _Text
    subnet_id: Annotated[str, Field(pattern=r"subnet-[0-9a-f]+")]
    trainer_launch_template: Template
    stager_launch_template: Template
    store_url: _Text
    project: Annotated[str, Field(pattern=r"[\w.:/=+@-]{1,128}")]
    run_id: Annotated[str, Field(pattern=r"[\w.:/=+@-]{1,128}")]
    tags: dict[str, str] = {}

    @classmethod
    def load(cls, path: Path) -> ClusterFile:
        """Read `terraform output -json`, or the plain values. Raises `ConfigError`, which names each wrong value."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: this file cannot be read: {error}; make it with `terraform output -json > {path.name}`"
            ) from error
        if not isinstance(document, dict):
            raise ConfigError(
                f"{path}: expected the object that `terraform output -json` prints, got a {type(document).__name__}"
            )
        try:
            return cls.model_validate({name: _value(value) for name, value in document.items()})
        except ValidationError as error:
            lines = [
                f"{path}: {'.'.join(map(str, detail['loc']))}: expected {detail['msg']}, got {detail['input']!r}"
                if detail["type"] != "missing"
                else f"{path}: {'.'.join(map(str, detail['loc']))}: missing; use the output of infra/examples"
                for detail in error.errors(include_url=False)
            ]
            raise ConfigError("\n".join(lines)) from None

    @property
    def state_path(self) -> Path:
        """The file in which `up` records its generation."""
        import platformdirs

        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in f"{self.project}-{self.run_id}")
        return Path(platformdirs.user_state_dir("holdfast", appauthor=False)) / "clusters" / f"{name}.json"

    @property
    def settings_path(self) -> Path:
        """The file in which `up` records its arguments, so that `holdfast run --cluster` can replace lost trainers."""
        return self.state_path.with_suffix(".wish.json")

    @property
    def identifying_tags(self) -> dict[str, str]:
        """The tags that identify machines of this run."""
        return {"Project": self.project, "RunId": self.run_id}


def _value(output: Any) -> Any:
    if isinstance(output, dict) and "value" in output and set(output) <= {"value", "type", "sensitive"}:
        return output["value"]
    return output
