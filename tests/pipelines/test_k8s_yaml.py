"""The blocks of docs/deployment.md on Kubernetes: what dagster-k8s makes of them, without a cluster.

It wants dagster-k8s, installed or in a folder dagster-k8s-0.29.27 below the one that NIELS_GPT_PEERS names: .ci/run.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._config import process_config
from dagster._core.execution.api import create_execution_plan
from support import ROOT
from support.documents import blocks_of

FOLDER = Path(os.environ.get("NIELS_GPT_PEERS", "")) / "dagster-k8s-0.29.27"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("dagster_k8s") is None,
    reason="no dagster-k8s: set NIELS_GPT_PEERS to a folder with dagster-k8s-0.29.27, see .ci/run",
)
FILES = {block.title: block.body for block in blocks_of((ROOT / "docs" / "deployment.md").read_text("utf-8"))}
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {}}]
current-context: none
"""


@pytest.fixture(autouse=True, scope="module")
def dagster_k8s():
    """Make it importable behind all that is installed."""
    sys.path.append(str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def job() -> dg.JobDefinition:
    """The assets of the page's code location."""
    names = {"__name__": "k8s_location"}
    exec(compile(FILES["k8s_location.py"], "k8s_location.py", "exec"), names)
    return names["defs"].resolve_implicit_global_asset_job_def()


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """The page's run launcher, outside of a cluster."""
    from dagster_k8s.launcher import K8sRunLauncher

    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    given = yaml.safe_load(FILES["run_launcher.yaml"])["run_launcher"]
    assert (given["module"], given["class"]) == ("dagster_k8s", K8sRunLauncher.__name__)
    for name in given["config"]["env_vars"]:
        assert name in FILES["dagster.yaml"]
        monkeypatch.setenv(name, "5432")
    outside = {"load_incluster_config": False, "kubeconfig_file": str(tmp_path / "kubeconfig")}
    checked = process_config(K8sRunLauncher.config_type(), {**given["config"], **outside})
    assert checked.success, checked.errors
    return K8sRunLauncher.from_config_value(None, checked.value)


def step(job: dg.JobDefinition, run_config: dict[str, Any], launcher: Any, key: str) -> Any:
    """Return the Kubernetes job of a step, made as dagster-k8s's executor makes it."""
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import UserDefinedDagsterK8sConfig, construct_dagster_k8s_job, get_user_defined_k8s_config

    found = create_execution_plan(job, run_config).get_step_by_key(key)
    per_step = dg.validate_run_config(job, run_config)["execution"]["k8s"]["per_step_k8s_config"]
    of_step = UserDefinedDagsterK8sConfig.from_dict(per_step.get(found.node_handle.name, {}))
    context = K8sContainerContext.create_for_run(dg.DagsterRun(job_name="a"), launcher, include_run_tags=False)
    for config in (get_user_defined_k8s_config(found.tags), of_step):
        context = context.merge(K8sContainerContext(run_k8s_config=config))
    made = construct_dagster_k8s_job(
        context.get_k8s_job_config(None, launcher), ["dagster"], "step", user_defined_k8s_config=context.run_k8s_config
    )
    return made.spec.template.spec


@pytest.mark.parametrize(
    ("key", "with_config", "without"),
    [("pretrain__wikitext.build_partition[?]", "2Gi", "4Gi"), ("pretrain__wikitext.seal_cache", "4Gi", "4Gi")],
)
def test_a_step_is_a_pod_with_the_resources_and_the_folder_of_the_page(
    job: dg.JobDefinition, launcher: Any, key: str, with_config: str, without: str
) -> None:
    for run_config, memory in ((yaml.safe_load(FILES["k8s_run.yaml"]), with_config), ({}, without)):
        pod = step(job, run_config, launcher, key)
        (container,) = pod.containers
        assert container.image == "registry.internal/niels-gpt:0.1.0"
        assert container.resources.requests == {"cpu": "4", "memory": memory}
        assert container.resources.limits == {"memory": "8Gi"}
        assert "/data" in [each.mount_path for each in container.volume_mounts]
        assert "data" in [
            each.persistent_volume_claim.claim_name for each in pod.volumes if each.persistent_volume_claim
        ]
        secrets = [each.value_from.secret_key_ref for each in container.env if each.value_from]
        assert [(each.name, each.key) for each in secrets] == [("dagster-postgresql", "postgresql-password")]
        assert "DAGSTER_PG_PASSWORD" in FILES["dagster.yaml"]
