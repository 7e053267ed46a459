"""probe"""
from __future__ import annotations
import math, threading, time
from pathlib import Path
import pytest, torch
import chat_tokenizers as kinds
from niels_gpt.eagle3.models import load_target, target_facts
from niels_gpt.eagle3.tokenizers import open_tokenizer
import transformers

@pytest.fixture(autouse=True)
def quick(monkeypatch):
    from types import SimpleNamespace
    q = SimpleNamespace(**{**vars(time), "sleep": lambda s: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", q)
    monkeypatch.setattr("huggingface_hub.file_download.time", q)

def write(folder, seed=0, **kw):
    kinds.write_tokenizer(folder)
    c = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=400, max_position_embeddings=64)
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(c).save_pretrained(folder, **kw)
    return folder

def show(hub):
    for r in hub.requests: print("   ", r.method, r.path[-90:], r.status)

def test_plain(loopback_hub, tmp_path):
    sha = loopback_hub.add_model("s/plain", write(tmp_path))
    print(sorted(p.name for p in tmp_path.iterdir()))
    t=time.time(); f = target_facts("s/plain"); print(f, time.time()-t); show(loopback_hub); loopback_hub.requests.clear()
    t=time.time(); load_target("s/plain", revision=None, dtype=torch.float32, attention="sdpa", device="cpu"); print("LOAD", time.time()-t); show(loopback_hub); loopback_hub.requests.clear()
    t=time.time(); open_tokenizer("s/plain", revision=sha); print("TOK", time.time()-t); show(loopback_hub)

def trying(name, what):
    t=time.time()
    try:
        print(name, "->", what())
    except BaseException as e:
        print(name, "!!", type(e).__module__, type(e).__name__, "|", str(e).replace("\n"," / ")[:400])
    print("   took", round(time.time()-t,2))

def test_faults(loopback_hub, tmp_path):
    hub=loopback_hub
    L=lambda n: (lambda: type(load_target(n, revision=None, dtype=torch.float32, attention="sdpa", device="cpu")).__name__)
    w=write(tmp_path/"w")
    trying("unknown", lambda: target_facts("s/none"))
    trying("unknown load", L("s/none"))
    trying("unknown tok", lambda: open_tokenizer("s/none"))
    hub.add_model("s/gated", w, gated=True)
    trying("gated", lambda: target_facts("s/gated"))
    trying("gated tok", lambda: open_tokenizer("s/gated"))
    hub.add_model("s/rev", w)
    trying("rev", lambda: target_facts("s/rev", revision="v9"))
    trying("rev tok", lambda: open_tokenizer("s/rev", revision="v9"))
    hub.add_model("s/x403", w); f=hub.fail("s/x403", status=403, times=math.inf)
    trying("403", lambda: target_facts("s/x403"))
    trying("403 tok", lambda: open_tokenizer("s/x403"))
    for st in (503, 429):
        n=f"s/x{st}"
        hub.add_model(n, w); hub.fail(n, status=st, times=3)
        trying(f"{st} for a while", lambda: target_facts(n))
        n=f"s/y{st}"
        hub.add_model(n, w); hub.fail(n, status=st, times=math.inf)
        trying(f"{st} for good", lambda: target_facts(n))
        trying(f"{st} for good load", L(n))
        trying(f"{st} for good tok", lambda: open_tokenizer(n))
    n="s/weights503"; hub.add_model(n, w); hub.fail("model.safetensors", status=503, times=math.inf)
    trying("weights", L(n)); hub.faults.clear()
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json", "special_tokens_map.json"):
        n="s/"+name.replace(".","-"); sha=hub.add_model(n, w); hub.fail(name, status=503, times=math.inf)
        trying("tok "+name, lambda: (lambda t: (t.sha256[:8], t.template_sha256, t.pad_id, t.special_token_ids))(open_tokenizer(n, revision=sha))); hub.faults.clear()
        n=n+"2"; sha=hub.add_model(n, w); hub.fail(name, status=503, times=2)
        trying("tok 2x "+name, lambda: (lambda t: (t.sha256[:8], t.template_sha256, t.pad_id, t.special_token_ids))(open_tokenizer(n, revision=sha))); hub.faults.clear()
    n="s/cut"; hub.add_model(n, w); hub.cut("model.safetensors", after=1000, times=3); hub.cut("/cdn/", after=1000, times=3)
    trying("cut", L(n)); hub.faults.clear()
    n="s/foreign"; hub.add_model(n, w); hub.foreign("s/foreign", times=math.inf)
    trying("foreign", lambda: target_facts(n)); hub.faults.clear()
    n="s/foreign2"; hub.add_model(n, w); target_facts(n); hub.foreign("s/foreign2", times=math.inf)
    trying("foreign tok", lambda: open_tokenizer(n)); 
    trying("foreign load", L(n)); hub.faults.clear()

def test_bin(loopback_hub, tmp_path):
    w=write(tmp_path/"w")
    from safetensors.torch import load_file
    torch.save(load_file(w/"model.safetensors"), w/"pytorch_model.bin")
    hub=loopback_hub
    n="s/both"; hub.add_model(n,w); hub.fail("model.safetensors", status=503, times=math.inf)
    trying("both", lambda: load_target(n, revision=None, dtype=torch.float32, attention="sdpa", device="cpu") and 1); hub.faults.clear(); hub.requests.clear()
    (w/"model.safetensors").unlink()
    n="s/bin"; hub.add_model(n,w)
    trying("bin", lambda: load_target(n, revision=None, dtype=torch.float32, attention="sdpa", device="cpu") and 1)
    print(threading.enumerate()); time.sleep(1); show(hub)

def test_code(loopback_hub, tmp_path):
    import json
    w=write(tmp_path/"w"); p=w/"config.json"
    for k,mt in (("a","llama"),("b","strange")):
        p.write_text(json.dumps({**json.loads(p.read_text()), "model_type": mt, "auto_map": {"AutoConfig":"evil.C","AutoModelForCausalLM":"evil.M"}}))
        (w/"evil.py").write_text("import os; os.mkdir('/tmp/EVIL')\nclass C: ...\n")
        n=f"s/code{k}"; loopback_hub.add_model(n,w)
        trying("code", lambda: target_facts(n))
        trying("code load", lambda: load_target(n, revision=None, dtype=torch.float32, attention="sdpa", device="cpu") and 1)

def test_nothing(tmp_path):
    trying("nothing facts", lambda: target_facts("s/off"))
    trying("nothing load", lambda: load_target("s/off", revision=None, dtype=torch.float32, attention="sdpa", device="cpu") and 1)
    trying("nothing tok", lambda: open_tokenizer("s/off"))
    trying("nothing tok plain", lambda: open_tokenizer("s/plain"))
    trying("home", lambda: open_tokenizer("~/nosuch"))
