"""The main job (train.py), with each rank as if alone on a spot machine with its own metadata server.

NOTICED_SERVERS: the server's URL for each rank, separated by commas.
"""

from __future__ import annotations

import os

from tests.integration.jobs import train


def main() -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = os.environ["NOTICED_SERVERS"].split(",")[rank]
    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "0"
    train.main()


if __name__ == "__main__":
    main()
