"""Assets with a tokenizer that is named: what a run builds with one without sentinels, and with them."""

import dataclasses
from pathlib import Path

import dagster as dg
import pytest
from support.dagster_runs import metadata, run
from support.made_tokenizers import made_tokenizer
from support.pipeline_seams import CACHES

from niels_gpt.settings import Settings
from niels_gpt.tokenizers.sentinels import add_sentinels

CHATS = {"sft/dolly15k", "sft/oasst1", "trees/oasst1"}


@pytest.fixture
def plain(settings):
    """Settings that name a tokenizer without sentinels."""
    return dataclasses.replace(settings, tokenizer=str(made_tokenizer("t5")))


@pytest.mark.slow
def test_a_run_of_all_assets_leaves_out_the_chats_and_builds_the_others(
    instance: dg.DagsterInstance, plain: Settings, tmp_path: Path
) -> None:
    result = run(instance, plain)
    shown = metadata(result)
    assert result.success and set(shown) == {"tokenizer", *CACHES} - CHATS
    assert shown["tokenizer"]["tokenizer_kind"] == "huggingface" and shown["tokenizer"]["vocab_size"] == "1100"
    assert shown["pretrain/roam"]["document_end"] == {"id": 1, "token": "</s>"}
    assert shown["pretrain/roam"]["run/engine"] == "tokenizers"
    assert shown["pretrain/roam"]["token_dtype"] == "uint16-le"
    skipped = {event.step_key for event in result.all_events if event.event_type_value == "STEP_SKIPPED"}
    assert skipped == {f"check_{key.replace('/', '__')}" for key in CHATS}

    failed = run(instance, plain, "sft/oasst1", raise_on_error=False)
    (failure,) = [event for event in failed.all_events if event.is_step_failure]
    assert "the tokenizer has no sentinels" in str(failure.event_specific_data)
    assert "niels-gpt add-sentinels" in str(failure.event_specific_data)

    add_sentinels(str(plain.tokenizer), tmp_path / "with")
    whole = run(instance, dataclasses.replace(plain, tokenizer=str(tmp_path / "with")))
    assert whole.success and set(metadata(whole)) == {"tokenizer", *CACHES}
    assert metadata(whole)["sft/oasst1"]["special_token_ids"]["eot"] == 1_103
