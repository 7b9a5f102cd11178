"""mlflow: runs, parameters, metrics and artifacts in a file store."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

from mlflow.tracking import MlflowClient

from tests.libraries.programs.frame import main

STEPS = 60
RUNS = 3


def write(top: Path) -> None:
    client = MlflowClient(tracking_uri=(top / "mlruns").as_uri())
    experiment = client.create_experiment("training")
    (top / "plot.txt").write_text("a plot")
    for number in range(RUNS):
        run = client.create_run(experiment, run_name=f"run {number}").info.run_id
        client.log_param(run, "number", number)
        for step in range(STEPS):
            client.log_metric(run, "loss", 1 / (step + 1), step=step, timestamp=1000 + step)
        for phase in ("warm-up", "training", "done"):
            client.set_tag(run, "phase", phase)
        client.log_artifact(run, str(top / "plot.txt"), "plots")
        client.set_terminated(run)
    client.delete_run(run)


def check(top: Path) -> None:
    client = MlflowClient(tracking_uri=(top / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("training")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == [f"run {n}" for n in range(RUNS - 1)]
    for run in runs:
        assert run.data.params["number"] == run.info.run_name.split()[-1]
        assert run.data.tags["phase"] == "done" and run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(metric.step, metric.value) for metric in history] == [
            (step, 1 / (step + 1)) for step in range(STEPS)
        ]
        # Where artifacts are is stored as an absolute path: that of the mount.
        kept = list((top / "mlruns").glob(f"*/{run.info.run_id}/artifacts/plots/plot.txt"))
        assert [path.read_text() for path in kept] == ["a plot"]


if __name__ == "__main__":
    main(write, check)
