"""``python -m ray_dynbs`` is the command ``ray-dynbs``."""

from ray_dynbs.cli.main import main

if __name__ == "__main__":
    main()
