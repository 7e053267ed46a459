from loopback_hub import LoopbackHub
import numbered_datasets as nd
from niels_gpt.data import hub
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.wikitext import iter_wikitext
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.oasst1 import iter_oasst1_sft
import datasets, pytest, time
import datasets.config
@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
def show(h):
    for r in h.requests: print(r)
    h.requests.clear()
def test_a(loopback_hub):
    h=loopback_hub
    h.add("HuggingFaceFW/fineweb-edu", nd.fineweb_edu())
    h.add("Salesforce/wikitext", nd.wikitext())
    h.add("databricks/databricks-dolly-15k", nd.dolly())
    h.add("OpenAssistant/oasst1", nd.oasst1())
    print(hub.revision_of("Salesforce/wikitext"))
    for f in ["parquet","jsonl","jsonl.gz"]:
        h.add("HuggingFaceFW/fineweb-edu", nd.fineweb_edu(form=f))
        t=time.time()
        for s in (False, True):
            print([nd.number_of(x.text) for x in iter_fineweb_edu(shuffle=s)], time.time()-t)
            show(h)
    print(len(list(iter_wikitext(split="train"))),time.time()-t)
    show(h)
    print(len(list(iter_dolly_sft())),time.time()-t)
    show(h)
    print(len(list(iter_oasst1_sft())),time.time()-t)
    show(h)
