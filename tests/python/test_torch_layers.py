"""octet.layers: what is recorded is what attention was called with, errors are those of octet.check, plans keep what
they promise, and models run by them."""

import html
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys

import octet
import pytest

torch = pytest.importorskip("torch")
from octet import _command, layers  # noqa: E402

# An error is a mean over about 10^5 numbers of a sample; other heads and other text have other errors.
SPREAD = 1.5


class Attention(torch.nn.Module):
    """Two heads of q over one of k and v."""

    def forward(self, q, k, v, mask=None):
        self.o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.25, enable_gqa=True
        )
        self.o.retain_grad()
        return self.o


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, q, k, v, mask=None):
        return self.first(q, k, v).sum() + self.second(2 * q, k, v, mask).square().sum()


def inputs(tokens=40, batch=2):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, tokens, 16, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v


def test_calls_are_what_attention_was_called_with():
    model, (q, k, v) = Two(), inputs()
    mask = torch.rand(1, 4, 40, 40) > 0.2
    with layers.capture(model) as calls:
        model(q, k, v, mask).backward()
    assert [call.module for call in calls] == ["first", "second"]
    for call, part, size in zip(calls, (model.first, model.second), (1, 2), strict=True):
        assert torch.equal(call.q, size * q[:1]) and torch.equal(call.k, k[:1]) and torch.equal(call.v, v[:1])
        assert torch.equal(call.do, part.o.grad[:1]) and call.scale == 0.25
    assert calls[0].causal and calls[0].mask is None and not calls[1].causal and torch.equal(calls[1].mask, mask)
    model(q, k, v)
    assert len(calls) == 2, "it goes on after the context"


def test_as_much_is_kept_as_was_asked_for():
    model, (q, k, v) = Two(), inputs()
    mask = torch.rand(40, 40) > 0.2
    with layers.capture(model, heads=1, tokens=8, calls=2) as calls:
        for _ in range(3):
            model(q, k, v, mask)
    assert len(calls) == 4
    for call in calls:
        assert torch.equal(call.q / (1 + (call.module == "second")), q[:1, :2, :8]) and call.do is None
        assert torch.equal(call.k, k[:1, :1, :8]) and call.k.untyped_storage().nbytes() == 8 * 16 * 4
    assert torch.equal(calls[1].mask, mask[None, None, :8, :8])


def test_a_file_gives_the_calls_back(tmp_path):
    pytest.importorskip("safetensors")
    model, (q, k, v) = Two(), inputs()
    with layers.capture(model) as calls:
        model(q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.ones(40, 40, dtype=torch.bool)).backward()
    layers.save(calls, tmp_path / "calls.safetensors")
    for call, again in zip(calls, layers.load(tmp_path / "calls.safetensors"), strict=True):
        for name, x in vars(call).items():
            y = getattr(again, name)
            assert torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(x) else x == y, name


def test_modules_of_torch_are_recorded_and_run_by_a_plan():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 24, 32)
    own = torch.nn.functional.scaled_dot_product_attention
    for precision in (None, "int8"):
        if precision:
            layers.apply(model, {"modules": {"self_attn": {"precision": precision}}})
        with layers.capture(model) as calls:
            o = model(x)
            o.square().sum().backward()
        assert [call.module for call in calls] == ["self_attn"] and calls[0].do is not None
        assert torch.nn.functional.scaled_dot_product_attention is own
    with octet.patch_sdpa("int8"):
        layers.apply(model, {"modules": {}})
        assert torch.equal(model(x), o)
    assert not torch.equal(model(x), o)


def captured():
    model, (q, k, v) = Two(), inputs()
    with layers.capture(model) as calls:
        model(q, k, v, torch.rand(40, 40) > 0.2).backward()
    return calls


def test_errors_are_those_of_octet_check():
    calls = captured()
    rows = layers.errors(calls, ("bf16", "int8", "int8_f16"), bias_correction="f16")
    assert [(row["module"], row["precision"]) for row in rows] == [
        (module, precision) for module in ("first", "second") for precision in ("bf16", "int8", "int8_f16")
    ]
    for row in rows:
        if row["precision"] == "int8_f16":
            assert "no backward pass" in row["reason"]  # and none of forward passes alone, as gradients were recorded
            continue
        (call,) = [x for x in calls if x.module == row["module"]]
        how = {"mask": call.mask, "causal": call.causal, "scale": 0.25, "precision": row["precision"]}
        want = octet.check(call.q, call.k, call.v, do=call.do, **how)
        assert {name: want[name].rel_l2 for name in layers.TENSORS} == {name: row[name] for name in layers.TENSORS}
        assert row["seconds"] > 0
    for call in calls:
        call.do = None
    rows = layers.errors(calls, ("int8_f16",))
    assert all("dq" not in row and 0 < row["o"] < 0.1 for row in rows)


def row(module, precision, seconds, **found):
    return {"module": module, "precision": precision, "seconds": seconds} | found


FOUND = [
    row("a", "f32", 3.0, o=1e-7, dq=2e-7, dk=1e-7, dv=1e-7),
    row("a", "bf16", 2.0, o=1e-3, dq=4e-3, dk=1e-3, dv=1e-3),
    row("a", "int8", 1.0, o=1e-3, dq=math.nan, dk=1e-3, dv=1e-3),
    {"module": "a", "precision": "fp8_raw", "reason": "none"},
    row("b", "f32", 3.0, o=1e-7),
    row("b", "int8", 1.0, o=5e-3),
]


def test_a_plan_has_the_fastest_within_the_budget():
    def chosen(budget):
        return {name: x["precision"] for name, x in layers.plan(FOUND, budget)["modules"].items()}

    assert chosen(0.02) == {"a": "bf16", "b": "int8"}
    assert chosen(0.0045) == {"a": "bf16", "b": "f32"}
    assert chosen(1e-4) == {"a": "f32", "b": "f32"}
    plan = layers.plan(FOUND, 0.02)
    assert json.loads(json.dumps(plan)) == plan and plan["modules"]["a"]["error"] == 4e-3
    with pytest.raises(octet.InvalidArgument, match="budget: found 1e-08, allowed for 'a': at least 2e-07 of .* f32"):
        layers.plan(FOUND, 1e-8)


def llama(implementation="sdpa"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:  # logits of some size, as training makes them
        layer.self_attn.q_proj.weight.data *= 8
        layer.self_attn.k_proj.weight.data *= 8
    text = torch.randint(256, (2, 96))
    return model, {"input_ids": text, "labels": text}, lambda out: out.loss


def dit():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        num_embeds_ada_norm=10,
    ).eval()
    for x in model.parameters():  # gates start at 0
        x.data += 0.05 * torch.randn_like(x)
    inputs = {"timestep": torch.tensor([1]), "class_labels": torch.tensor([1])}
    return model, inputs | {"hidden_states": torch.randn(1, 4, 16, 16)}, lambda out: out.sample.square().mean()


@pytest.mark.parametrize("make", [llama, dit])
def test_a_plan_keeps_what_it_promises(make):
    model, batch, loss = make()
    with layers.capture(model, heads=1, tokens=64) as calls:
        loss(model(**batch)).backward()
    assert len(calls) == len({call.module for call in calls}) >= 2
    plan = layers.plan(layers.errors(calls, ("f32", "bf16", "int8"), repeats=1), 0.05)
    for entry, precision in zip(plan["modules"].values(), ("int8", "bf16", "int8"), strict=False):
        entry["precision"] = precision  # whatever was fastest here
    promised = {
        (row["module"], row["precision"]): max(row[name] for name in layers.TENSORS)
        for row in layers.errors(calls, ("bf16", "int8"), repeats=1)
    }
    exact = loss(model(**batch)).item()
    layers.apply(model, plan)
    assert loss(model(**batch)).item() == pytest.approx(exact, rel=0.02)
    layers.apply(model, {"modules": {}})
    assert loss(model(**batch)).item() == exact
    # The same modules on all heads and tokens of the batch.
    with layers.capture(model, heads=100, tokens=10**6) as whole:
        loss(model(**batch)).backward()
    for row in layers.errors(whole, ("bf16", "int8"), repeats=1):
        measured = max(row[name] for name in layers.TENSORS)
        assert 1 / SPREAD < measured / promised[row["module"], row["precision"]] < SPREAD, row


def test_a_model_computes_in_the_precisions_of_its_plan():
    model, (q, k, v) = Two(), inputs()
    plan = {"modules": {"first": {"precision": "int8"}, "second": {"precision": "bf16"}}}
    layers.apply(model, plan)
    first, second = model.first(q, k, v), model.second(q, k, v)
    assert torch.equal(first, octet.sdpa(q, k, v, None, 0, True, scale=0.25, enable_gqa=True, precision="int8"))
    assert torch.equal(second, octet.sdpa(q, k, v, None, 0, True, scale=0.25, enable_gqa=True, precision="bf16"))
    with layers.capture(model) as calls:  # a model with a plan can be recorded again
        model(q, k, v)
    assert [call.module for call in calls] == ["first", "second"]
    layers.apply(model, {"modules": {"first": {"precision": "bf16"}}})
    assert torch.equal(model.first(q, k, v), second) and not torch.equal(model.second(q, k, v), second)


def test_a_model_trains_under_a_plan():
    model, batch, loss = llama()
    names = [name for name, x in model.named_modules() if name.endswith("self_attn")]
    chosen = zip(names, ("int8", "bf16", "int8"), strict=True)
    layers.apply(model, {"modules": {name: {"precision": precision} for name, precision in chosen}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        found = loss(model(**batch))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    assert losses[-1] < losses[0] - 1


class Page(html.parser.HTMLParser):
    """Counts cells, and holds that every element ends."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.texts, self.links = [], 0, [], []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        self.cells += tag == "td"
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_report_is_one_page():
    page = Page()
    text = layers.report([*FOUND, row("<c>", "bf16", 1.0, o=1.0)])
    page.feed(text)
    assert page.open == [] and page.links == [] and "http" not in text and "<c>" in page.texts
    modules, precisions, tables = 3, 4, 5
    assert page.cells == modules * precisions * tables
    assert "0.004" in page.texts and "nan" in page.texts and 'name="viewport"' in text
    assert "hsl(120" in text and "hsl(0 " in text
    page = Page()
    page.feed(layers.report([row("a.b", "bf16", 1.0, o=1.0), {"module": "a.b", "precision": "fp8", "reason": "1 < 2"}]))
    assert "none: 1 < 2" in page.texts and page.open == []


# What a reader sees, as the page writes it into itself: what does not fit, and colours of text on what is behind it.
LOOKS = """<script>
const shown = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const behind = document.createElement("p");
behind.style.background = "Canvas";
document.body.append(behind);
function blended(...colours) {
  for (const colour of colours) { shown.fillStyle = colour; shown.fillRect(0, 0, 1, 1); }
  return [...shown.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
const page = getComputedStyle(behind).backgroundColor, cells = [...document.querySelectorAll("td, th")];
const found = {
  width: innerWidth, needed: document.documentElement.scrollWidth, page: blended(page),
  tables: [...document.querySelectorAll("table")].map(x => [x.offsetWidth, x.parentNode.clientWidth]),
  cells: cells.map(x => getComputedStyle(x)).map(x => [blended(x.color), blended(page, x.backgroundColor)])
};
document.body.innerHTML = "<pre></pre>";
document.body.firstChild.textContent = JSON.stringify(found);
</script>"""


def seen(page, width, dark, folder):
    """What LOOKS finds in a window of some width."""
    browser = shutil.which("chromium-headless-shell")
    if not browser:
        pytest.skip("no chromium-headless-shell")
    (folder / "page.html").write_text(page.replace("</body>", f"{LOOKS}</body>"))
    scheme = [f"--blink-settings=preferredColorScheme={int(not dark)}"]
    how = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},800", *scheme, "--dump-dom"]
    command = [browser, f"--user-data-dir={folder / 'profile'}", *how, (folder / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return json.loads(html.unescape(re.search("<pre>(.*)</pre>", dom, re.DOTALL)[1]))


def brightness(colour):
    """The relative luminance of WCAG 2."""
    parts = [x / 255 for x in colour]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1000])
def test_a_report_fits_and_is_read_in_light_and_dark(width, dark, tmp_path):
    errors = [1.3 * 10.0**-n for n in range(8)] + [math.nan]
    rows = [
        row(f"down_blocks.{i}.attentions.0.transformer_blocks.0.attn1", precision, 1e-3 * i, o=x, dq=x, dk=x, dv=x)
        for i, x in enumerate(errors)
        for precision in layers.PRECISIONS
    ]
    found = seen(layers.report(rows), width, dark, tmp_path)
    assert found["width"] == width == found["needed"]
    assert len(found["tables"]) == 5 and all(table <= room for table, room in found["tables"])
    assert (brightness(found["page"]) < 0.05) == dark
    for text, ground in found["cells"]:
        less, more = sorted(map(brightness, (text, ground)))
        assert (more + 0.05) / (less + 0.05) >= 4.5, (text, ground)  # WCAG 2, level AA


def test_the_command_reads_a_file(tmp_path, capsys, monkeypatch):
    pytest.importorskip("safetensors")
    file = str(tmp_path / "calls.safetensors")
    layers.save(captured(), file)
    layers.main([file, "--budget", "0.01", "--precisions", "f32,bf16", "--html", str(tmp_path / "page.html")])
    plan = json.loads(capsys.readouterr().out)
    assert plan["budget"] == 0.01 and {x["precision"] for x in plan["modules"].values()} <= {"f32", "bf16"}
    assert "</html>" in (tmp_path / "page.html").read_text()
    for command in ("plan", "report"):
        monkeypatch.setattr(sys, "argv", ["octet", command, file, "--budget", "0.01", "--precisions", "f32,bf16"])
        _command.main()
        assert json.loads(capsys.readouterr().out).keys() == plan.keys()
    monkeypatch.setattr(sys, "argv", ["octet", "plan", file])
    with pytest.raises(SystemExit):
        _command.main()
    assert "octet plan: error: the following arguments are required: --budget" in capsys.readouterr().err
    layers.main([file, "--precisions", "f32"])
    assert [x["module"] for x in json.loads(capsys.readouterr().out)] == ["first", "second"]


def test_what_is_wrong_is_named(tmp_path):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(octet.Unsupported, match="model: Linear called no scaled_dot_product_attention"):
        with layers.capture(model):
            model(torch.zeros(1, 4))
    assert not model._forward_hooks and not model._forward_pre_hooks
    with pytest.raises(octet.InvalidArgument, match="plan: found module 'third', allowed: those of Two"):
        layers.apply(Two(), {"modules": {"third": {"precision": "bf16"}}})
    with pytest.raises(octet.InvalidArgument, match="plan: precision of 'first': found 'int9', allowed: 'f64', 'f32'"):
        layers.apply(Two(), {"modules": {"first": {"precision": "int9"}}})
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"q": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(octet.InvalidArgument, match="found no calls of attention, allowed: a file of octet"):
        layers.load(tmp_path / "other.safetensors")
    with pytest.raises(octet.InvalidArgument, match="precision: found 'int9'"):
        layers.errors(captured(), ("int9",))
