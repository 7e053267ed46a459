"""What Dagster makes of the tags that it reserves for itself, and that our steps write: docs/decisions/0031 to 0033.

No code of ours is run here. A release of Dagster that fails one of these changes what our steps may rely on.
"""

from collections.abc import Mapping

import dagster as dg
import pytest
from support.dagster_runs import stale_in

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
UP, DOWN = dg.AssetKey(["raw", "text"]), dg.AssetKey(["sft", "chats"])
DATA, INPUT = "dagster/data_version", "dagster/input_data_version/raw/text"


@pytest.fixture
def instance():
    """An instance of Dagster in memory."""
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def definitions(tags: Mapping[str, str], *logged: object, deps: tuple[dg.AssetKey, ...] = (UP,)) -> dg.Definitions:
    """Return an observed source, or one that a step makes, and an asset whose step logs events and gives these tags."""

    @dg.asset(key=DOWN, deps=deps, code_version="of the definitions")
    def chats(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        for event in logged:
            context.log_event(event)
        return dg.MaterializeResult(data_version=dg.DataVersion("same"), tags=tags)

    @dg.multi_observable_source_asset(specs=[dg.AssetSpec(UP)])
    def text():
        yield dg.ObserveResult(asset_key=UP, data_version=dg.DataVersion("read"))

    return dg.Definitions([chats, text])


def run(instance: dg.DagsterInstance, given: dg.Definitions, key: dg.AssetKey = DOWN) -> Mapping[str, str]:
    """Run one asset; return the tags of its last event."""
    job = given.resolve_implicit_global_asset_job_def().get_subset(asset_selection={key})
    assert job.execute_in_process(instance=instance).success
    event = instance.get_latest_materialization_event(DOWN)
    return (event and event.asset_materialization and event.asset_materialization.tags) or {}


def test_a_results_code_version_counts_and_not_that_of_the_definitions(instance: dg.DagsterInstance) -> None:
    assert run(instance, definitions({}))["dagster/code_version"] == "of the definitions"
    assert stale_in(instance, definitions({})) == {}
    other = definitions({"dagster/code_version": "of the run"})
    assert run(instance, other)["dagster/code_version"] == "of the run"
    assert stale_in(instance, other) == {"sft/chats": "has a new code version"}


def test_a_results_input_version_counts_and_not_that_of_the_steps_start(instance: dg.DagsterInstance) -> None:
    observation = dg.AssetObservation(UP, tags={DATA: "read"})
    assert run(instance, definitions({}, observation))[INPUT] == "INITIAL"
    assert stale_in(instance, definitions({})) == {"sft/chats": "has a new dependency data version"}
    assert run(instance, definitions({INPUT: "read"}))[INPUT] == "read"
    assert stale_in(instance, definitions({})) == {}
    run(instance, definitions({}), UP)
    assert stale_in(instance, definitions({})) == {}, "an observation of the same version"
    nothing = definitions({INPUT: "read"}, deps=())
    run(instance, nothing)
    assert stale_in(instance, nothing) == {"sft/chats": "removed dependency on raw/text"}


def test_a_logged_materialization_has_the_versions_that_its_tags_name_and_no_others(
    instance: dg.DagsterInstance,
) -> None:
    run(instance, definitions({}), UP)
    given = {DATA: "same", "dagster/code_version": "of the definitions", INPUT: "read"}
    for tags, cause in (
        ({**given, "dagster/input_event_pointer/raw/text": "NULL"}, None),
        (
            {**given, "dagster/input_event_pointer/raw/text": "NULL", INPUT: "older"},
            "has a new dependency data version",
        ),
        (given, "has a new dependency on raw/text"),
    ):
        instance.report_runless_asset_event(dg.AssetMaterialization(DOWN, tags=tags))
        assert stale_in(instance, definitions({})).get("sft/chats") == cause


def test_a_logged_observation_has_the_data_version_of_its_tag(instance: dg.DagsterInstance) -> None:
    run(instance, definitions({INPUT: "read"}, dg.AssetObservation(UP, tags={DATA: "read"})))
    (record,) = instance.fetch_observations(UP, limit=1).records
    assert record.asset_observation is not None and record.asset_observation.data_version == "read"
    assert stale_in(instance, definitions({})) == {}
    run(instance, definitions({INPUT: "read"}, dg.AssetObservation(UP)))
    assert stale_in(instance, definitions({})) == {"sft/chats": "has a new dependency data version"}
