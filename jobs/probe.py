"""``ray-dynbs probe`` as an entry point: ``ray job submit --working-dir . -- python jobs/probe.py CONF``."""

import sys
from pathlib import Path

# In a submitted job the package lies beside this folder and may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ray_dynbs.cli.main import main  # needs the path above

if __name__ == "__main__":
    main(["probe", *sys.argv[1:]])
