"""Trains a small GPT over bytes with attention in the precision asked for, and logs what that does to loss and
gradients.

    python examples/train/train.py runs/int8 --preset tiny --precision int8 --qk-norm
    python examples/train/train.py --resume runs/int8

The folder of a run holds log.jsonl and checkpoint.pt. `curves.py` draws the logs.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import pathlib
import platform
import shlex
import sys
import time

import measure
import octet
import torch
from gpt import GPT, SIZES, Attend
from text import Text
from tqdm import tqdm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS = ("torch", "f32", "f16", "bf16", "int8", "fp8", "sagebwd")
CORRECTIONS = ("f16", "none", "beta", "exact_delta", "gproj")
# Options of a run that may change when it is resumed: they do not change what it computes.
OF_A_SESSION = {"out", "resume", "stop_at", "minutes", "checkpoint_every", "keep_at"}
HELD_OUT_TOKENS, MEASURED_TOKENS = 65536, 512


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", nargs="?", help="the folder of a new run")
    add(
        "--resume", metavar="RUN", help="continue the run of a folder; it gives the same bits as one that never stopped"
    )
    add("--preset", choices=SIZES, default="10m", help="size of the model, in parameters  [10m]")
    add("--precision", choices=PRECISIONS, default="bf16", help="of attention; torch: scaled_dot_product_attention")
    add("--bias-correction", choices=CORRECTIONS, default="f16", help="of f16 and bf16  [f16]")
    add(
        "--backward-precision",
        choices=PRECISIONS[1:],
        default="",
        help="of the backward pass, where it is not that of the forward pass: int8 computes s from quantized q and k, "
        "bf16 from q and k as they are given  [that of the forward pass]",
    )
    add("--rounding", default="", help="roundings in float64 on the CPU, as flash,delta=p or p=bf16 (octet.Rounding)")
    add("--qk-norm", action="store_true", help="normalise q and k of each head")
    add("--dropout", type=float, default=0.0, help="of the outputs of branches, not of P  [0]")
    add("--dtype", choices=DTYPES, default="float32", help="of activations; weights are float32  [float32]")
    add("--length", type=int, default=0, help="tokens of a sequence  [64 at tiny, else 1024]")
    add("--tokens-per-step", type=int, default=0, help="[256 at tiny, else 65536]")
    add("--micro-batch", type=int, default=0, help="sequences of one pass; 0: all of a step  [0]")
    add("--steps", type=int, default=0, help="[200 at tiny, else 2000]")
    add("--lr", type=float, default=0.0, help="highest learning rate  [0.003 at tiny, else 0.0006]")
    add("--seed", type=int, default=0, help="of weights, text and dropout  [0]")
    add("--start-from", default="", metavar="CHECKPOINT", help="the weights of another run, for fine-tuning")
    add("--text", nargs="+", default=[], metavar="FOLDER", help="Python sources  [the standard library]")
    add("--megabytes", type=float, default=64.0, help="of training text, at most  [64]")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--log-every", type=int, default=10, help="steps  [10]")
    add("--held-out-every", type=int, default=0, help="steps  [a tenth of all]")
    add("--measure-every", type=int, default=0, help="steps between measurements of gradients  [a tenth of all]")
    add("--checkpoint-every", type=int, default=500, help="steps  [500]")
    add(
        "--keep-at",
        type=int,
        nargs="+",
        default=[],
        metavar="STEP",
        help="write q, k, v and do of two layers after these steps, on held-out text, to RUN/step-STEP.safetensors",
    )
    add("--stop-at", type=int, default=0, help="stop after this step, to be resumed")
    add("--minutes", type=float, default=0.0, help="stop after so long, to be resumed")
    options = parser.parse_args(words)
    if bool(options.out) == bool(options.resume):
        parser.error("found a new run and --resume, or neither, allowed: one of them")
    if options.resume:
        given = {x.dest for x in parser._actions if getattr(options, x.dest, x.default) != x.default}
        for name in sorted(given - OF_A_SESSION):
            allowed = ", ".join(f"--{x.replace('_', '-')}" for x in sorted(OF_A_SESSION - {"out", "resume"}))
            parser.error(f"--resume: found --{name.replace('_', '-')} beside it, allowed: {allowed}")
    return options


def with_defaults(options: argparse.Namespace) -> dict:
    """The configuration of a new run: all that decides what it computes."""
    run = {name: x for name, x in vars(options).items() if name not in OF_A_SESSION}
    tiny = options.preset == "tiny"
    for name, small, other in (
        ("length", 64, 1024),
        ("tokens_per_step", 256, 65536),
        ("steps", 200, 2000),
        ("lr", 3e-3, 6e-4),
    ):
        run[name] = run[name] or (small if tiny else other)
    for name in ("held_out_every", "measure_every"):
        run[name] = run[name] or max(1, run["steps"] // 10)
    sequences, rest = divmod(run["tokens_per_step"], run["length"])
    if rest or not sequences:
        raise SystemExit(
            f"--tokens-per-step: found {run['tokens_per_step']}, allowed: multiples of the length {run['length']}"
        )
    run["micro_batch"] = run["micro_batch"] or sequences
    if sequences % run["micro_batch"]:
        raise SystemExit(
            f"--micro-batch: found {run['micro_batch']}, allowed: divisors of {sequences}, the sequences of a step"
        )
    return run


def rounding_of(text: str) -> octet.Rounding | None:
    """The Rounding of "flash,delta=p": points and values as in Python; a first word flash stands for FlashAttention."""
    if not text:
        return None
    words = text.split(",")
    points: dict = {}
    for word in words[words[0] == "flash" :]:
        name, _, value = word.partition("=")
        try:
            points[name] = json.loads(value.lower())  # numbers, true and false
        except json.JSONDecodeError:
            points[name] = value
    return octet.Rounding.flash(**points) if words[0] == "flash" else octet.Rounding(**points)


def command_of(run: dict) -> str:
    """The line that repeats a run, but for its folder."""
    words = ["python", "examples/train/train.py", "RUN"]
    for name, value in run.items():
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not False and value not in ("", []):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def card(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else octet.info()["cpu"]["model"]


class Log:
    """JSON, a line for each entry, written as the run goes."""

    def __init__(self, path: pathlib.Path, until: int = -1):
        """`until`: entries of later steps are dropped, those of a run that went on after its checkpoint."""
        if until >= 0:
            lines = path.read_text().splitlines()
            kept = [line for line in lines if json.loads(line).get("step", 0) <= until]
            path.write_text("".join(f"{line}\n" for line in kept))
        elif path.exists():
            raise SystemExit(f"{path}: there is a run already; name another folder, or --resume it")
        self._file = path.open("a", buffering=1)

    def __call__(self, kind: str, **entry: object) -> None:
        self._file.write(json.dumps({"kind": kind, **entry}) + "\n")


class Run:
    """The state of a training run, and its steps."""

    def __init__(self, folder: pathlib.Path, config: dict):
        self.folder, self.config, self.step = folder, config, 0
        self.device = torch.device(config["device"])
        torch.manual_seed(config["seed"])
        self.text = Text(config["text"], config["megabytes"])
        attend = Attend(
            config["precision"],
            config["bias_correction"],
            config["backward_precision"],
            rounding_of(config["rounding"]),
        )
        size = SIZES[config["preset"]]
        self.model = GPT(size, attend, config["qk_norm"], config["dropout"]).to(self.device)
        if config["start_from"]:
            self.model.load_state_dict(torch.load(config["start_from"], map_location=self.device)["model"])
        parameters = list(self.model.parameters())
        groups = [
            {"params": [x for x in parameters if x.ndim >= 2], "weight_decay": 0.1},
            {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config["lr"], betas=(0.9, 0.95))

    def autocast(self) -> contextlib.AbstractContextManager:
        dtype = DTYPES[self.config["dtype"]]
        return torch.autocast(self.device.type, dtype) if dtype is not torch.float32 else contextlib.nullcontext()

    def lr(self) -> float:
        """A linear start, then half a cosine down to a tenth."""
        steps, start = self.config["steps"], max(1, self.config["steps"] // 20)
        if self.step < start:
            return self.config["lr"] * (self.step + 1) / start
        return self.config["lr"] * (0.55 + 0.45 * math.cos(math.pi * (self.step - start) / max(1, steps - start)))

    def train_step(self) -> tuple[float, float]:
        """The loss, in nats a byte, and the norm of the gradient."""
        c = self.config
        count, micro = c["tokens_per_step"] // c["length"], c["micro_batch"]
        text, after = (x.to(self.device) for x in self.text.batch(c["seed"], self.step, count, c["length"]))
        loss = torch.zeros((), device=self.device)
        for first in range(0, count, micro):
            with self.autocast():
                part = self.model.loss(text[first : first + micro], after[first : first + micro]) * micro / count
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss), float(norm)

    @torch.no_grad()
    def held_out(self) -> float:
        """Nats a byte of text that no run trains on."""
        self.model.eval()
        c = self.config
        count = max(1, min(HELD_OUT_TOKENS, 16 * c["tokens_per_step"]) // c["length"])
        text, after = (x.to(self.device) for x in self.text.held_out_batch(count, c["length"]))
        loss = 0.0
        for first in range(0, count, c["micro_batch"]):
            part = slice(first, first + c["micro_batch"])
            with self.autocast():
                loss += float(self.model.loss(text[part], after[part])) * len(text[part]) / count
        self.model.train()
        return loss

    def measured(self) -> tuple:
        """What functions of measure.py take."""
        text, after = self.text.held_out_batch(1, min(self.config["length"], MEASURED_TOKENS))
        return self.model, text.to(self.device), after.to(self.device), self.autocast

    def digest(self) -> str:
        """Equal where all weights are equal, bit by bit."""
        found = hashlib.sha256()
        for x in self.model.state_dict().values():
            found.update(x.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self) -> None:
        state = {
            "config": self.config,
            "step": self.step,
            "text": self.text.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        unfinished = self.folder / "checkpoint.pt.tmp"
        torch.save(state, unfinished)
        os.replace(unfinished, self.folder / "checkpoint.pt")

    @classmethod
    def resumed(cls, folder: pathlib.Path) -> "Run":
        state = torch.load(folder / "checkpoint.pt", map_location="cpu")
        run = cls(folder, state["config"] | {"start_from": ""})
        run.config = state["config"]
        if run.text.digest != state["text"]:
            raise SystemExit(f"{folder}: its text is {state['text']}, but here it is {run.text.digest}")
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.step = state["step"]
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"], run.device)
        return run


def begin(options: argparse.Namespace) -> tuple[Run, Log]:
    """A new run, or one that goes on."""
    if options.resume:
        folder = pathlib.Path(options.resume)
        if not (folder / "checkpoint.pt").exists():
            raise SystemExit(f"--resume: found {folder}, allowed: a folder with a checkpoint.pt")
        run = Run.resumed(folder)
        return run, Log(folder / "log.jsonl", run.step)
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    log = Log(folder / "log.jsonl")
    run = Run(folder, with_defaults(options))
    log(
        "config",
        **run.config,
        command=command_of(run.config),
        parameters=sum(x.numel() for x in run.model.parameters()),
        digest_of_text=run.text.digest,
        card=card(run.config["device"]),
        date=datetime.date.today().isoformat(),
        versions={"octet": octet.__version__, "torch": torch.__version__, "python": platform.python_version()},
    )
    return run, log


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    run, log = begin(options)
    c, started, since = run.config, time.monotonic(), (time.monotonic(), run.step)
    print(command_of(c), file=sys.stderr)
    until = min(options.stop_at or c["steps"], c["steps"])
    bar = tqdm(total=c["steps"], initial=run.step, unit="step", disable=None)

    def look() -> None:
        """What is logged between steps, at the first and at the last one too."""
        if run.step % c["held_out_every"] == 0 or run.step == c["steps"]:
            log("held_out", step=run.step, loss=run.held_out())
        if run.step % c["measure_every"] == 0 or run.step == c["steps"]:
            log("gradients", step=run.step, layers=measure.of_model(*run.measured()))
        if run.step in options.keep_at:
            measure.save(*run.measured(), run.folder / f"step-{run.step}.safetensors")

    if run.step == 0:
        look()
    while run.step < until and not (options.minutes and time.monotonic() - started > 60 * options.minutes):
        loss, norm = run.train_step()
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        if run.step % c["log_every"] == 0 or run.step == c["steps"]:
            seconds, steps = time.monotonic() - since[0], run.step - since[1]
            speed = round(steps * c["tokens_per_step"] / seconds)
            log("step", step=run.step, loss=loss, norm=norm, lr=run.lr(), tokens_per_second=speed)
        if not math.isfinite(loss):
            log("end", step=run.step, digest=run.digest(), diverged=True)
            raise SystemExit(f"step {run.step}: the loss is {loss}")
        look()
        if run.step % c["log_every"] == 0:
            since = time.monotonic(), run.step  # held-out text and measurements take no part in the speed
        if run.step % options.checkpoint_every == 0:
            run.save()
    bar.close()
    run.save()
    if run.step == c["steps"]:
        log("end", step=run.step, digest=run.digest(), diverged=False)
    print(f"step {run.step} of {c['steps']}: held-out loss {run.held_out():.4f} nats a byte, weights {run.digest()}")


if __name__ == "__main__":
    main()
