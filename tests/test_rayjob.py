"""The KubeRay manifest: its entry point is a command of this project with a configuration that holds."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from ray_dynbs.config import load_config

ROOT = Path(__file__).parents[1]


def test_the_manifest_runs_what_there_is() -> None:
    manifest = yaml.safe_load((ROOT / "jobs" / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    python, script, config, *options = shlex.split(spec["entrypoint"])
    assert python == "python"
    assert (ROOT / script).is_file()
    overrides = [options[i + 1] for i, word in enumerate(options) if word == "--set"]
    loaded = load_config(ROOT / config, overrides)
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits["nvidia.com/gpu"])
    assert loaded.cluster.worker_range == (workers["minReplicas"] * gpus, workers["maxReplicas"] * gpus)
    assert loaded.cluster.use_gpu is True
    assert options[options.index("--out") + 1].startswith("s3://")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={spec['rayClusterSpec']['rayVersion']}" in pins
    assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {"env_vars"}
