"""The training loop: optimizer steps of A slots, validations, checkpoints, and ways to end.

One step is A slots of S sequences. A slot's windows, depth and noise are functions of (seed, step, slot) alone, so a
resumed run repeats the interrupted one bit for bit, and evaluating changes nothing.
"""

import contextlib
import hashlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from grt.backbone.context import LoopContext
from grt.config import RunConfig, config_hash
from grt.console import Task, say, watching, working
from grt.data.loader import batch, bigram_entropy
from grt.data.prepare import Prepared, open_source
from grt.device import autocast, dtype_name, peak_flops, resolve_device, resolve_dtype
from grt.errors import ConfigError
from grt.evals.loss import Evaluation, evaluate
from grt.methods import build_model, depth_sampler
from grt.model.cost import parameters, training_flops
from grt.model.depth import Depth
from grt.model.loop import Loss
from grt.runs.checkpoint import Checkpoints, State
from grt.runs.folder import FolderLock, claim, environment, resume_command, write_headers
from grt.runs.metrics import MetricsLog, forget_after, read_metrics
from grt.runs.paths import absolute
from grt.runs.plots import draw_curve
from grt.train.diagnose import NonFiniteError, first_offender
from grt.train.interrupt import Interrupt, Stopped
from grt.train.memory import training_peak
from grt.train.monitor import monitor, warnings_for
from grt.train.optim import learning_rate, make_optimizer
from grt.train.resume import changed_environment, restore, text_of
from grt.train.stage import enter_stage
from grt.train.start import load_initial

EARLY = 2.0  # seconds that a signal leaves for a validation where there was none yet


def slot_seed(seed: int, step: int, slot: int, rank: int = 0) -> int:
    """Seed of the global generator at the start of a slot (weights are drawn as step -1)."""
    return int.from_bytes(hashlib.sha256(f"slot/{seed}/{step}/{slot}/{rank}".encode()).digest()[:7], "big")


def open_data(config: RunConfig, progress: bool = False, quiet: bool = False) -> Prepared:
    """The prepared folder that config.data names, or its text, prepared now and cached."""
    source, text = config.data.path, config.data
    data = open_source(
        source,
        tokenizer=text.tokenizer,
        val_fraction=text.val_fraction,
        field=text.field,
        progress=progress,
        quiet=quiet,
    )
    if data.tokenizer.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but {data.folder} has {data.tokenizer.vocab_size} tokens "
            f"({data.tokenizer.name}): set --model.vocab-size {data.tokenizer.vocab_size}."
        )
    return data


class Trainer:
    """One run, from its config to its last checkpoint. `out` is its folder, which no other process may train into
    until `run` or `close` ends."""

    def __init__(self, config: RunConfig, out: Path, *, resume: bool = False, progress: bool = True) -> None:
        self.out, self.progress = Path(out), progress
        fresh = not self.out.exists()
        self.config, self.reading = claim(self.out, absolute(config), resume)
        self.hash = config_hash(self.config)
        self.at_rest = threading.RLock()  # held while weights and state change together, and while they are saved
        self.check: Callable[[], None] = lambda: None  # raises Stopped where a signal has come
        self.left = False
        self.lock = FolderLock(self.out)
        try:
            self._open(resume)
        except BaseException:  # whoever caught it may hold on to this object, and so to the lock
            self.lock.release()
            if fresh:  # a start that was refused leaves nothing behind
                with contextlib.suppress(OSError):
                    self.out.rmdir()
            raise

    def _open(self, resume: bool) -> None:
        config = self.config
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        self.device = resolve_device(config.train.device)
        self.sampler = depth_sampler(config.model, config.train.depth)
        torch.manual_seed(slot_seed(config.train.seed, -1, 0))
        self.model = build_model(config.model).to(self.device).train()
        enter_stage(self.model, config)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.checkpoints = Checkpoints(self.out, self.hash, config.train.keep)
        self.state, skipped = restore(self.checkpoints, self.model, self.optimizer) if resume else (State(), [])
        self.saved_step = self.state.step or -1
        self.drawn_step = -1
        begun = config.train.init_from and not self.state.step  # a resumed run does not need its source any more
        initial = {"init_from": load_initial(self.model, config)} if begun else {}
        # Text comes after what can be refused without it: preparing it may take long.
        self.data = open_data(self.reading, self.progress)
        self.train_split, self.val_split = (self.data.split(name, config.data.windows) for name in ("train", "val"))
        for split in (self.train_split, self.val_split):
            split.require(config.model.context + 1)
        if text_of(self.state, self.out, resume) not in ("", self.train_split.sha256):
            raise ConfigError(f"{self.data.folder} is not the text {self.out} began with: restore it, or start anew.")
        self.state.text_sha256 = self.train_split.sha256
        self._choose_precision()
        forget_after(self.out / "metrics.jsonl", self.state.step)
        if not self.state.step:
            facts = environment(self.device, vars(self.state), self.data.meta)
            write_headers(self.out, config, facts | initial, self.data.tokenizer)
        self.log = MetricsLog(self.out / "metrics.jsonl")
        if resume:
            changed = changed_environment(self.out, self.device)
            self.log.write("event", self.state.step, event="resume", skipped=skipped, changed=changed)

    def _choose_precision(self) -> None:
        width = self.config.model.d_model
        # A measured choice could fall differently on the next start: a resumed run keeps the first one's.
        self.dtype = resolve_dtype(self.state.dtype or self.config.train.dtype, self.device, width)
        if not self.state.dtype:
            self.state.dtype = dtype_name(self.dtype)
            self.state.peak, self.state.peak_source = peak_flops(self.device, self.dtype)

    def run(self, max_seconds: float | None = None, once: bool = False) -> int:
        """Train to the last step, or to a signal or time limit; returns the exit code (0, 129, 130 or 143). `once`:
        further signals are ignored. Raises NonFiniteError where the loss or a gradient is not finite.

        A signal breaks off the step or the validation in progress: a resumed run repeats it.
        """
        steps = self.config.train.steps
        try:
            with (
                watching("grt train"),
                Interrupt(max_seconds, once, self._leave) as interrupt,
                working("step", steps, start=self.state.step) as progress,
            ):
                self.check = interrupt.check
                self._say_start()
                code = self._train(interrupt, progress)
                if code is None:
                    self._draw()  # a kill may have come between the last checkpoint and its curve
            return code or 0
        finally:
            self.close()

    def _train(self, interrupt: Interrupt, progress: Task) -> int | None:
        """To the last step, or the exit code of a signal or time limit before it."""
        config, validated = self.config.train, self._take_up_validation()
        try:
            while not validated or self.state.step < config.steps:
                if validated:
                    row = self.optimizer_step()
                    told = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  MFU {row['mfu']:.1%}"
                    progress.reach(self.state.step, told)
                    if self.state.step == config.steps:
                        say(f"step {config.steps}/{config.steps}  {told}")
                    validated = not self._is_due()
                self.check()
                improved = not validated and self.validate()
                validated, last, code = True, self.state.step == config.steps, interrupt.exit_code
                if last or improved or code is not None or self.state.step % config.checkpoint_every == 0:
                    self.save()
                self.check()
                if code is not None and not last:
                    word = self._leave(None)
                    self._validate_early(math.inf)
                    say(word)
                    return interrupt.exit_code
        except Stopped as stop:
            self.optimizer.zero_grad(set_to_none=True)
            word = self._leave(interrupt.signal)
            self._validate_early(EARLY)
            say(word)
            self._draw()
            return stop.code
        return None

    def _validate_early(self, seconds: float) -> None:
        """Of a run that leaves before its first validation, so that short runs compare too; given up after `seconds`.
        It decides nothing, and a resumed run forgets it."""
        if not self.state.step or self._is_due() or any(row["kind"] == "eval" for row in read_metrics(self.log.path)):
            return
        end, check = time.monotonic() + seconds, self.check

        def late() -> None:
            if time.monotonic() > end:
                raise Stopped(signal.SIGTERM)
            if seconds == math.inf:
                check()

        self.check = late
        with contextlib.suppress(Stopped):
            self.validate(early=True)

    def _is_due(self) -> bool:
        """Whether a validation belongs to the step that was taken last."""
        step, config = self.state.step, self.config.train
        return step > 0 and (step == config.steps or step % config.eval_every == 0)

    def _take_up_validation(self) -> bool:
        """False where a signal has broken off the validation of the step that the run goes on from. One that was done
        after the checkpoint was written counts as it did then."""
        if not self._is_due():
            return True
        losses = [
            r["loss"] for r in read_metrics(self.log.path) if r["kind"] == "eval" and r["step"] == self.state.step
        ]
        if losses:
            self._count(losses[-1])
        return bool(losses)

    def _count(self, loss: float) -> bool:
        """Whether a validation's loss is the best so far, which the state then knows."""
        best = self.state.best_loss
        improved = best is None or loss < best
        if improved:
            self.state.best_loss, self.state.best_step = loss, self.state.step
            if self.saved_step == self.state.step:
                self.checkpoints.point(self.state)
        return improved

    def _leave(self, number: signal.Signals | None) -> str:
        """Save and log that a signal, or else the time limit, ends the run; returns the last word. Once: where the main
        thread is late, another one does it."""
        with self.at_rest:
            what = number.name if number else "max-time"
            how = f"go on with --resume ({resume_command(self.out)})"
            if not self.state.step:
                return f"{what}: no step was finished; {how}"
            self._checkpoint()
            if not self.left:
                self.left = True
                self.log.write("event", self.state.step, event="signal", signal=what)
            return f"{what}: saved step {self.state.step}; {how}"

    def close(self) -> None:
        """Let go of the folder; `run` does so itself."""
        self.log.close()
        self.lock.release()

    def _say_start(self) -> None:
        model, split = self.config.model, self.val_split
        n = parameters(self.model)["total"]
        say(
            f"{self.config.name}: {model.method_name} {model.layout}, {n:,} parameters, {self.state.dtype} on "
            f"{self.device.type} ({torch.get_num_threads()} threads); peak {self.state.peak / 1e9:,.0f} GFLOP/s "
            f"({self.state.peak_source})"
        )
        bigrams = f"; bigram entropy {bigram_entropy(split):.4f} nats" if split.has_bigrams else ""
        lost = self.train_split.unreachable(model.context)
        if lost:
            bigrams += f"; {lost:,} training tokens are out of reach, in documents shorter than a window"
        say(
            f"data: {self.train_split.n_tokens:,} tokens to train on, {split.n_tokens:,} to validate on{bigrams}; "
            f"sha256 {self.data.meta['corpus_sha256'][:12]}"
        )

    def optimizer_step(self) -> dict[str, Any]:
        """Accumulate A slots, clip, update; returns the row it logged."""
        if self.device.type != "cuda":
            _ = self._slot_peak  # measured once, before anything changes
        start, config, step = time.perf_counter(), self.config, self.state.step
        rate = learning_rate(config.optim, step, config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total, lm, depths = 0.0, 0.0, []
        for slot in range(config.n_slots):
            self.check()
            depth = self.sampler(config.train.seed, step, slot)
            loss = self.slot_loss(step, slot)
            (loss.total / config.n_slots).backward()
            depths.append(depth.steps)
            total += loss.total.item() / config.n_slots
            lm += loss.lm.item() / config.n_slots
            if not np.isfinite(total):
                self._stop_non_finite("loss", slot, [depth.steps])
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if not torch.isfinite(norm):  # clipping by it would spoil every gradient, and hide where it came from
            self._stop_non_finite("gradient", config.n_slots - 1, depths)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), config.optim.grad_clip, norm)
        tokens = config.train.tokens_per_step
        drawn = [Depth(steps, self.sampler.grad_steps) for steps in depths]
        flops = [training_flops(self.model, depth, config.model.context, config.train.stage) for depth in drawn]
        with self.at_rest:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - start
            self.state.step += 1
            self.state.seconds += seconds
            row = {
                "tokens": self.state.step * tokens, "loss": total, "loss_lm": lm, "aux": total - lm, "lr": rate,
                "grad_norm": norm.item(), "depth": depths, "tokens_per_s": tokens / seconds,
                "mfu": float(np.mean(flops)) * tokens / seconds / self.state.peak,
                "seconds": self.state.seconds, "peak_bytes": self._peak_bytes(),
            }  # fmt: skip
            self.log.write("train", self.state.step, **row)
        return row

    def slot_loss(self, step: int, slot: int, ctx: LoopContext | None = None, depth: Depth | None = None) -> Loss:
        """Forward pass of one slot: its windows, depth and noise depend on (seed, step, slot) only."""
        config = self.config
        rows = range(config.train.batch_size)
        ids, targets = batch(
            self.train_split, seed=config.train.seed, step=step, slot=slot, rows=rows, context=config.model.context
        )
        ctx = ctx or LoopContext()
        ctx.recompute = {"auto": self.model.rule.reads_out_often, "none": False, "readout": True}[
            config.train.recompute
        ]
        torch.manual_seed(slot_seed(config.train.seed, step, slot))
        with autocast(self.device, self.dtype):
            depth = depth or self.sampler(config.train.seed, step, slot)
            return self.model.loss(ids.to(self.device), targets.to(self.device), depth, ctx, config.train.stage)

    def _stop_non_finite(self, what: str, slot: int, depths: list[int]) -> None:
        step = self.state.step
        self._stop(step + 1, what, depths, first_offender(self.model, lambda ctx: self.slot_loss(step, slot, ctx)))

    def _stop(self, step: int, what: str, depths: list[int], offender: str) -> NoReturn:
        """depths: those that may be to blame; a gradient is the sum over all slots of a step."""
        self.log.write("event", self.state.step, event="nonfinite", what=what, depth=depths, module=offender)
        named = f"depth{'s' if len(depths) > 1 else ''} {', '.join(map(str, depths))}"
        raise NonFiniteError(
            f"the {what} is not finite at step {step} ({named}), first in {offender}: the last checkpoint is "
            "untouched; try a smaller --optim.lr or --train.dtype fp32 in a new folder."
        )

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._slot_peak

    @cached_property
    def _slot_peak(self) -> int:
        deepest = Depth(max(self.sampler.probabilities), self.sampler.grad_steps)
        with working("measuring the memory of a step"):
            return training_peak(self.model, lambda: self.slot_loss(0, 0, depth=deepest).total)

    def validate(self, early: bool = False) -> bool:
        """Validation loss at every depth, and the monitors; True where full depth is the best so far, as an early
        one never is."""
        config, step, R = self.config, self.state.step, self.config.model.blocks.R
        result = evaluate(
            self.model, self.val_split, limit=config.train.eval_windows, batch_size=config.train.batch_size,
            dtype=self.dtype, between=self.check,
        )  # fmt: skip
        losses = result.loss_by_depth
        if bad := [k for k, loss in losses.items() if not np.isfinite(loss)]:
            offender = first_offender(self.model, lambda ctx: self.slot_loss(step, 0, ctx))
            self._stop(step, "validation loss", bad[:1], offender)
        values = self._monitored() if R else {}
        with self.at_rest:
            self._log_validation(result, values, early)
            return not early and self._count(losses[R])

    def _monitored(self) -> dict[str, list[float]]:
        """What the monitors see in a pass over validation text."""
        ids, _ = batch(self.val_split, seed=0, step=0, slot=0, rows=range(4), context=self.config.model.context)
        return monitor(self.model, ids.to(self.device), self.dtype)

    def _log_validation(self, result: Evaluation, values: dict[str, list[float]], early: bool) -> None:
        step, R, routing = self.state.step, self.config.model.blocks.R, self.model.rule.routing
        losses, bits, mark = result.loss_by_depth, result.bits_per_byte(R), {"early": True} if early else {}
        self.log.write(
            "eval", step, split="val", tokens=result.tokens, loss=losses[R],
            loss_by_depth={str(k): loss for k, loss in losses.items()}, bits_per_byte=bits,
            **({"routing": routing} if routing else {}), **mark,
        )  # fmt: skip
        depths = "  by depth  " + "  ".join(f"{k}: {loss:.4f}" for k, loss in losses.items()) if R else ""
        say(f"step {step}  validation loss {losses[R]:.4f}  bits per byte {bits:.4f}{depths}")
        if R:
            if not np.isfinite(np.concatenate(list(values.values()))).all():  # such as a gate that no loss reads
                offender = first_offender(self.model, lambda ctx: self.slot_loss(step, 0, ctx))
                self._stop(step, "monitored pass", [R], offender)
            warnings = warnings_for(losses, values, routing)
            self.log.write("monitor", step, warnings=warnings, **values, **mark)
            for warning in warnings:
                say(f"warning: {warning}")

    def save(self) -> None:
        if self._checkpoint():
            self._draw()

    def _checkpoint(self) -> bool:
        """Whether there was anything to save."""
        with self.at_rest:
            if self.saved_step == self.state.step:
                return False
            with working("saving"):
                self.checkpoints.save(self.model, self.optimizer, self.state)
            self.saved_step = self.state.step
            self.log.write("event", self.state.step, event="save")
            return True

    def _draw(self) -> None:
        if self.drawn_step == self.state.step:
            return
        path = self.out / "curve.png"
        try:
            with working("drawing the curve"):
                draw_curve([self.out], path)
        except Exception as error:  # whatever ails a picture, training goes on
            print(f"warning: {path} cannot be drawn ({' '.join(str(error).split())})", file=sys.stderr)
        self.drawn_step = self.state.step
