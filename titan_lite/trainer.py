"""The trainer: builds the parts in order, then runs the loop. The only place that knows all of them.

    Trainer(config).train()

Everything that can be wrong with a recipe is found before a process group is started (`check.py`).
"""

import dataclasses
import datetime
import functools
import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_lite.checkpoint.resume import compare, explain, git_revision, refuse, restarts_data
from titan_lite.checkpoint.saving import GROUP as CHECKPOINT_GROUP
from titan_lite.checkpoint.saving import Checkpointer, CheckpointError
from titan_lite.checkpoint.weights import load_initial
from titan_lite.compiler.autotune import STEPS, WAYS, Trial
from titan_lite.compiler.receipt import Receipt, describe, write_receipts
from titan_lite.compiler.stage import CompileError, compile_function
from titan_lite.config import Config, ConfigError, flatten
from titan_lite.config.check import check, describe_run, without_effect
from titan_lite.config.recipe import to_toml
from titan_lite.data.bad_documents import LeftOutDocuments
from titan_lite.data.dataset import Split
from titan_lite.data.loader import Batch, Loader, build_loader, document_begins, merge_states
from titan_lite.data.preflight import check_first_loss, preflight
from titan_lite.distributed.accumulation import gathered_for_step
from titan_lite.distributed.build import build_schedule, build_stages, compile_stages
from titan_lite.distributed.context_parallel import own_positions
from titan_lite.distributed.gather import started_last
from titan_lite.distributed.mesh import build_mesh, data_rank, stage_exchange, sum_of_flags, sum_of_losses, sum_over_tokens
from titan_lite.distributed.pipeline import Pipeline
from titan_lite.distributed.simple_fsdp import materialize, shard_of
from titan_lite.distributed.tensor_parallel import axis_of
from titan_lite.faults import signals
from titan_lite.faults.restart import Restarts
from titan_lite.faults.spikes import SpikeGuard
from titan_lite.faults.stragglers import Stragglers
from titan_lite.faults.watchdog import PATIENCE, Watchdog
from titan_lite.layout import make_layout
from titan_lite.logging import events, logger
from titan_lite.loss import IGNORE_INDEX, build_loss, own_vocabulary
from titan_lite.lr_scheduler import lr_factor
from titan_lite.metrics.figures import MetricsWriter, draw_loss, peak_memory_gib
from titan_lite.metrics.lines import end_lines, start_lines
from titan_lite.metrics.profiling import build_profiler, set_flight_recorder
from titan_lite.metrics.timelines import write_timelines
from titan_lite.models.llama3 import Transformer, flops_per_token
from titan_lite.optimizer import build_optimizer, clip_grad_norm_, optimizer_state, set_learning_rate
from titan_lite.plan.measure import Shapes, find_machine, peak_flops
from titan_lite.plan.plan_vs_actual import PlanVsActual

DeviceBatch = tuple[Tensor, Tensor, Tensor | None]  # input, label and, with training.mask_documents, begins (models/llama3.py)


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to change."""


class Trainer:
    def __init__(self, config: Config):
        self.config = config
        self.dump_folder = Path(config.job.dump_folder)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        # 1. everything that may be wrong with the recipe
        self.layout = make_layout(config, self.world_size)
        self.tokenizer = check(config, self.layout)
        self.described = describe_run(config, self.layout, self.tokenizer, git_revision() if self.rank == 0 else "")
        self.checkpointer = Checkpointer(config.checkpoint, self.dump_folder)
        if self.rank == 0 and config.checkpoint.enable:
            self.checkpointer.lock()

        set_flight_recorder(config.comm.trace_buf_size, self.dump_folder)
        self.watchdog = Watchdog(config.comm, self.rank, self.world_size, notes=started_last, apart=CHECKPOINT_GROUP)
        with self.told_to_others():
            self.build()

    def build(self) -> None:
        config, degrees, plan = self.config, self.layout.degrees, self.layout.pipeline
        self.model_config, self.accumulation = self.layout.model, self.layout.accumulation

        # 2. the device, the processes, and how they are arranged
        self.watchdog.enter("start", "init_timeout_seconds")
        self.device = init_device(config)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=config.comm.init_timeout_seconds + PATIENCE),
            # A pipeline's sends and receives would wait for each other on a communicator that is made at once.
            device_id=self.device if self.device.type == "cuda" and degrees["pp"] == 1 else None,
        )
        self.mesh = build_mesh(degrees, self.device.type)
        self.dp_rank, self.dp_degree = data_rank(self.mesh)

        self.machine = find_machine(config.compile.machine, self.device) if config.compile.enable else None

        # 3. the model, or this rank's stages of it: on no device, made parallel, given memory, filled
        positions = own_positions(config.training.seq_len, self.mesh["cp"].get_local_rank(), self.mesh["cp"].size())
        self.stages = build_stages(
            functools.partial(Transformer, self.model_config),
            [plan.modules[stage] for stage in plan.stages_of(self.mesh["pp"].get_local_rank())],
            self.mesh,
            seq_len=config.training.seq_len,
            training=config.training,
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
        )
        self.receipts: list[Receipt] = []
        self.trial: Trial | None = None
        if config.compile.compiles("model"):
            if config.compile.bucketing == "measured":
                stage_exchange(self.mesh)  # whose groups are made by all ranks together
                self.trial = Trial(self.stages, self.compile_as, self.device)
            else:
                self.receipts = self.compile_as(config.compile.bucketing)
        self.watchdog.enter("start", "init_timeout_seconds")
        for model in self.stages:
            materialize(model, self.device)
            model.init_weights(config.debug.seed, shard_of)
        self.document_begin = self.tokenizer.bos_id
        self.parameters = {fqn: parameter for model in self.stages for fqn, parameter in model.named_parameters()}
        self.positions = torch.tensor(positions, device=self.device)
        tp = axis_of(self.mesh["tp"])
        self.loss_sum = build_loss(self.model_config.vocab_size, tp.rank, tp.degree, tp.group)
        if config.compile.compiles("loss"):
            self.loss_sum = compile_function(self.loss_sum, config.compile, "loss")
        self.pipeline = None
        if self.mesh["pp"].size() > 1:
            self.pipeline = Pipeline(
                self.stages,
                plan,
                self.mesh["pp"],
                config.parallelism,
                tokens=(sequences := self.layout.sequences, len(positions)),
                hidden=(sequences, len(positions) // tp.degree, self.model_config.dim),
                logits=(sequences, len(positions), len(own_vocabulary(self.model_config.vocab_size, tp.rank, tp.degree))),
                dtype=getattr(torch, config.training.mixed_precision_param),
                loss_sum=self.loss_sum,
                device=self.device,
            )

        # 4. what moves it
        compile_update = functools.partial(compile_function, config=config.compile, component="optimizer")
        self.optimizer = build_optimizer(
            config.optimizer,
            self.parameters.values(),
            compile=compile_update if config.compile.compiles("optimizer") else None,
        )
        self.gather_once = self.layout.gathers_once
        self.loader = self.build_loader("train")
        self.validation_loader = self.build_loader("validation") if config.validation.enable else None

        self.left_out = LeftOutDocuments(config.data, self.dump_folder, self.dp_rank)
        self.spikes = SpikeGuard(config.training.spike_window, config.training.spike_sigmas, self.device)

        # 5. where the run stands
        self.validated = False  # and so a graph without gradients compiled
        self.step = self.tokens_seen = self.skipped_steps = self.skipped_in_a_row = 0
        self.validation_due = config.validation.enable
        self.stopping = False  # asked to by a signal
        self.restarts = Restarts(self.dump_folder)
        self.resume()
        if self.trial is not None and config.training.steps - self.step < STEPS * len(WAYS):
            raise ConfigError(
                f'compile.bucketing = "measured" tries {len(WAYS)} ways in {STEPS} steps each, and from step {self.step} on '
                f'training.steps = {config.training.steps} leaves fewer; more of them, or bucketing = "block", would work'
            )

        # 6. what it says
        if self.rank == 0 and self.step < config.training.steps:  # with nothing to do, the recipe of what was done stays
            self.dump_folder.mkdir(parents=True, exist_ok=True)
            saved = dataclasses.replace(config, job=dataclasses.replace(config.job, dump_folder=str(self.dump_folder.resolve())))
            try:
                (self.dump_folder / "config.toml").write_text(to_toml(saved), encoding="utf-8")
            except OSError as error:
                wrong = f'job.dump_folder = "{config.job.dump_folder}": {error.strerror}: {error.filename}'
                raise ConfigError(f"{wrong}; a folder that can be written would work") from None
        dist.barrier()
        self.metrics = MetricsWriter(
            config.metrics,
            self.dump_folder,
            flatten(config),
            writes=self.rank == 0,
            first_step=self.step,
            total_steps=config.training.steps,
        )
        self.plan_vs_actual = PlanVsActual(config.metrics.compare_plan, self.dump_folder, self.device)
        self.stragglers = Stragglers(self.rank, self.mesh.mesh.flatten(1).tolist(), self.device)
        self.peak_flops = peak_flops(self.device, getattr(torch, config.training.mixed_precision_param))
        self.flops_per_token = flops_per_token(self.model_config, config.training.seq_len)
        for line in start_lines(
            config,
            self.layout,
            device=self.device,
            parameters=self.parameters.values(),
            without_effect=without_effect(config, self.layout),
            priced=self.machine is not None,
        ):
            logger.info(line)
        events.step = self.step
        said = f"steps: {self.step} done of {config.training.steps}; output in {self.dump_folder}"
        logger.info(said, extra={"event": "start"})

    def compile_as(self, bucketing: str) -> list[Receipt]:
        """The model's stages, compiled at their first call; what becomes the receipts."""
        config = self.config
        compile = dataclasses.replace(config.compile, bucketing=bucketing)
        schedule = build_schedule(compile, self.mesh, self.machine, dump_folder=self.dump_folder, must_merge=self.trial is None)
        compile_stages(
            self.stages,
            self.mesh,
            schedule,
            compile=compile,
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
        )
        return schedule.receipts

    def build_loader(self, split: Split) -> Loader:
        data = self.config.data
        if split == "validation":
            # Short and seldom: not worth a process, nor filling the shuffle buffer of a stream from afar.
            here = all(part.dataset in ("stdlib", "local", "prepared") for _, part in data.mixture())
            data = dataclasses.replace(data, num_workers=0, shuffle=data.shuffle and here)
        return build_loader(
            data,
            self.tokenizer,
            split=split,
            rows=self.layout.rows,
            batch_size=self.config.training.local_batch_size,
            seq_len=self.config.training.seq_len,
            dp_rank=self.dp_rank,
            dp_degree=self.dp_degree,
            seed=self.config.debug.seed,
        )

    def train(self) -> bool:
        """Until training.steps, or a signal to stop (False); saves and measures. Raises TrainingError where it cannot go on."""
        with self.told_to_others():
            try:
                return self.loop()
            except ConfigError:
                for loader in self.loaders:
                    self.left_out.list_alone(loader.take_left_out())
                raise

    @property
    def loaders(self) -> list[Loader]:
        return [loader for loader in (self.loader, self.validation_loader) if loader is not None]

    @contextmanager
    def told_to_others(self) -> Iterator[None]:
        """Within: what ends this rank, the others learn of it, and it of them. Raises TrainingError."""
        try:
            yield
        except Exception as error:
            cause = self.watchdog.failed(error)
            if cause or isinstance(error, CompileError | CheckpointError):
                raise TrainingError(cause or str(error)) from error
            raise
        finally:
            self.watchdog.rest()

    def loop(self) -> bool:
        config = self.config
        if self.step >= config.training.steps:
            logger.info(
                f"nothing to do: step {self.step} is done, and training.steps = {config.training.steps}; raise it to go on"
            )
        trying = True  # until everything is compiled, and the way to bucket decided
        gc.disable()  # ranks that collect at different moments wait for each other
        self.watchdog.enter("the first step", "compile_timeout_seconds" if config.compile.enable else "init_timeout_seconds")
        if self.step < config.training.steps:
            preflight(self.loader.peek(), self.tokenizer, self.model_config.vocab_size, self.dp_rank)
        self.start_window()
        with build_profiler(config.profiling, self.dump_folder, self.rank, self.step) as profiler:
            if not self.asked_to_stop() and self.validation_due:
                self.validate()
            while self.step < config.training.steps and not self.stopping:
                self.step += 1
                events.step = self.step
                if self.rank == 0:
                    self.restarts.begin(self.step)
                self.watchdog.beat(f"step {self.step}")
                last = self.step == config.training.steps
                self.validation_due = config.validation.enable and (self.step % config.validation.freq == 0 or last)
                if self.step % config.training.gc_freq == 0:
                    gc.collect(1)
                with self.trial.step() if trying and self.trial else nullcontext():
                    loss, grad_norm, lr = self.train_step()
                if self.step == 1 and not config.checkpoint.initial_load_path:
                    check_first_loss(loss, self.model_config.vocab_size)
                if trying and (self.trial is None or self.trial.chosen):
                    trying = False
                    self.validated = self.validated and self.trial is None
                    self.show_receipts()
                    if self.rank == 0 and self.device.type == "cuda":  # elsewhere it would take the run's cores
                        self.plan_vs_actual.start(self.machine or find_machine(config.compile.machine, self.device))
                    self.watchdog.enter(f"step {self.step}", "train_timeout_seconds")  # what takes longer now is no compilation
                if self.step % config.metrics.log_freq == 0 or last:
                    self.log(loss, grad_norm, lr)
                self.metrics.advance()
                profiler.step()
                if self.validation_due and not self.stopping:
                    self.validate()
                if config.checkpoint.enable and (self.step % config.checkpoint.interval == 0 or last or self.stopping):
                    self.save(last and not self.unfinished)
                    self.asked_to_stop()
                self.checkpointer.poll()
        with self.watchdog.within("save", "init_timeout_seconds"):
            self.checkpointer.wait()
        if self.stopping and self.unfinished:
            self.finish("stopped")
            return False
        self.finish("done")
        return True

    @property
    def unfinished(self) -> bool:
        """Whether a run that stops here is to be started again."""
        return self.step < self.config.training.steps or self.validation_due

    def train_step(self) -> tuple[float, float, float]:
        """One optimizer step; returns (loss, gradient norm, learning rate), the same on every rank."""
        batches = [self.next_batch() for _ in range(self.accumulation)]
        tokens = torch.stack([(label != IGNORE_INDEX).sum() for _, label, _ in batches]).sum()
        sum_over_tokens(tokens, self.mesh)

        loss = self.forward_backward(batches, tokens)
        grad_norm = clip_grad_norm_(self.parameters.values(), self.config.training.max_norm)
        lr = self.config.optimizer.lr * lr_factor(self.step, self.config.lr_scheduler, self.config.total_steps)
        set_learning_rate(self.optimizer, lr)

        ending = torch.stack((loss, torch.full_like(loss, bool(signals.received()))))
        sum_of_losses(ending, self.mesh)
        sum_of_flags(ending[1:], self.mesh)
        loss_value, norm_value, asked = torch.stack((ending[0], grad_norm, ending[1])).tolist()
        # Both are sums over all ranks, so every rank decides the same, and before a parameter has changed.
        if math.isfinite(loss_value) and math.isfinite(norm_value) and not self.spikes.is_spike(self.step, loss_value):
            self.optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skip_step(loss_value, norm_value)
        self.optimizer.zero_grad()
        self.tokens_seen += int(tokens)
        if asked:
            self.stop()
        return loss_value, norm_value, lr

    def forward_backward(self, batches: list[DeviceBatch], tokens: Tensor) -> Tensor:
        """Gradients of the loss over `tokens` tokens of all ranks; returns this rank's part of the loss, a scalar."""
        total = torch.zeros((), device=self.device)
        with ExitStack() as gathered:
            for model in self.stages if self.gather_once else ():
                gathered.enter_context(gathered_for_step(model))
            for batch in batches:
                total += self.backward_one(batch, tokens)
                self.watchdog.beat()
        return total

    def backward_one(self, batch: DeviceBatch, tokens: Tensor) -> Tensor:
        if self.pipeline is not None:
            return self.pipeline.forward_backward(*batch, tokens)
        input, label, begins = batch
        loss = self.loss_sum(self.stages[0](input, begins), label) / tokens
        loss.backward()
        return loss.detach()

    def skip_step(self, loss: float, grad_norm: float) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        limit = self.config.training.max_nonfinite_steps
        spike = self.spikes.describe(self.step)
        if self.rank == 0:
            why = spike or f"loss {loss}, gradient norm {grad_norm}"
            logger.warning(f"step {self.step} skipped: {why}; {self.skipped_in_a_row} in a row", extra={"event": "skip"})
        if self.skipped_in_a_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row had a non-finite loss or gradient{', or a spike,' if self.spikes.window else ''} "
                f"(training.max_nonfinite_steps), the last one "
                f"step {self.step}; parameters are those of step {self.step - limit}. "
                f"A lower optimizer.lr = {self.config.optimizer.lr} "
                f'or training.mixed_precision_param = "float32" may help'
            )

    @torch.no_grad()
    def validate(self) -> None:
        """The loss on the first validation.steps global batches of held-out documents, logged with the current step."""
        if self.validation_loader is None:
            return
        started, beginning = time.perf_counter(), self.validation_loader.state_dict()
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        key = "compile_timeout_seconds" if self.config.compile.enable else "init_timeout_seconds"
        with nullcontext() if self.validated else self.watchdog.within("validation", key):
            for _ in range(self.config.validation.steps):
                for _ in range(self.accumulation):
                    self.watchdog.beat("validation")
                    batch = self.to_device(next(self.validation_loader))
                    sums[0] += self.evaluate_one(batch)
                    sums[1] += (batch[1] != IGNORE_INDEX).sum()
                if self.asked_to_stop():
                    return  # a resumed run begins with it
            sum_of_losses(sums[0], self.mesh)
        self.validated = self.trial is None or bool(self.trial.chosen)
        sum_over_tokens(sums[1], self.mesh)
        self.validation_loader.load_state_dict(beginning)
        self.metrics.log(self.step, {"validation_loss": float(sums[0] / sums[1])})
        self.validation_due = False
        self.window_start += time.perf_counter() - started  # throughput is of training alone

    def evaluate_one(self, batch: DeviceBatch) -> Tensor:
        if self.pipeline is not None:
            return self.pipeline.evaluate(*batch)
        input, label, begins = batch
        return self.loss_sum(self.stages[0](input, begins), label)

    def asked_to_stop(self) -> bool:
        """Whether a signal has asked any rank to stop. All ranks call it together, where no step's end does as much."""
        asked = torch.tensor(bool(signals.received()), dtype=torch.int32, device=self.device)
        dist.all_reduce(asked)
        if asked:
            self.stop()
        return self.stopping

    def stop(self) -> None:
        """All ranks: no step follows this one."""
        if self.stopping:
            return
        self.stopping = True
        names = [""] * self.world_size
        dist.all_gather_object(names, signals.received())
        if not self.config.checkpoint.enable:
            then = "checkpoint.enable = false, so nothing is saved; exiting"
        elif self.step == self.checkpointer.newest:
            then = "exiting"
        elif self.step == self.checkpointer.tried and self.checkpointer.saving is None:
            then = f"exiting; the newest step on disk is {self.checkpointer.newest}"
        else:
            then = "saving, then exiting"
        if self.rank == 0:  # a warning, so wherever LOG_RANK points
            code = f" (code {signals.STOPPED})" if self.unfinished else ", as the run is done"
            logger.warning(f"{signals.reason(names)} at step {self.step}: {then}{code}", extra={"event": "stop"})

    def next_batch(self) -> DeviceBatch:
        started = time.perf_counter()
        batch = next(self.loader)
        self.waited_for_data += time.perf_counter() - started
        return self.to_device(batch)

    def to_device(self, batch: Batch) -> DeviceBatch:
        """Of every sequence the tokens that are this rank's under context parallelism."""
        input, label = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        begins = None
        if self.config.training.mask_documents:
            begins = document_begins(input, self.document_begin)[:, self.positions]
        return input[:, self.positions], label[:, self.positions], begins

    def start_window(self) -> None:
        """What is logged next is about the time from now on."""
        self.window_start, self.window_step, self.waited_for_data = time.perf_counter(), self.step, 0.0

    def log(self, loss: float, grad_norm: float, lr: float) -> None:
        now = time.perf_counter()
        seconds, steps = now - self.window_start, self.step - self.window_step
        tps = steps * self.layout.tokens / self.world_size / seconds
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tps": tps,
            "tflops": tps * self.flops_per_token / 1e12,
            "memory_gib": peak_memory_gib(self.device),
            "data_wait": 100 * self.waited_for_data / seconds,
            "step_time": seconds / steps,
            "tokens_seen": self.tokens_seen,
            "skipped_steps": self.skipped_steps,
        }
        if self.peak_flops is not None:
            values["mfu"] = 100 * tps * self.flops_per_token / self.peak_flops
        values |= self.left_out.gather([loader.take_left_out() for loader in self.loaders])
        self.metrics.log(self.step, values)
        slow = self.stragglers.compare()
        if slow and self.rank == 0:
            logger.warning(f"step {self.step}: {slow}", extra={"event": "slow"})
        self.start_window()

    def state_tensors(self) -> dict[str, Tensor]:
        model = {f"model.{fqn}": parameter.detach() for fqn, parameter in self.parameters.items()}
        optimizer = optimizer_state(self.optimizer, self.parameters)
        return {**model, **{f"optimizer.{name}": tensor for name, tensor in optimizer.items()}}

    def save(self, last: bool = False) -> None:
        started = time.perf_counter()
        states: list[dict] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(states, self.loader.state_dict())
        state = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "spikes": self.spikes.state_dict(),
            "loader": merge_states(states),
            "validation_due": self.validation_due,
            **self.described,
        }
        with self.watchdog.within("save", "init_timeout_seconds"):
            self.checkpointer.save(self.step, self.state_tensors(), state, last=last)
        self.window_start += time.perf_counter() - started

    def resume(self) -> None:
        """Go on from the newest checkpoint, or from the one that checkpoint.load_step names; otherwise stay at the beginning."""
        step = self.checkpointer.verified_step() if self.config.checkpoint.enable else None
        if step is None:
            load_initial(self.config.checkpoint.initial_load_path, self.parameters, shard_of)
            return
        state = self.checkpointer.read_state(step)
        differences = compare(state, self.described)
        refuse(
            differences, self.checkpointer.path_of(step), self.config.checkpoint, done=state["step"] >= self.config.training.steps
        )
        for line in explain(differences, state, self.described):
            logger.info(line)
        held = {name: tensor for name, tensor in self.state_tensors().items() if name.partition(".")[0] in state["tensors"]}
        self.checkpointer.load(step, held)
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        self.validation_due = state.get("validation_due", False)
        self.skipped_steps, self.skipped_in_a_row = state["skipped_steps"], state["skipped_in_a_row"]
        self.spikes.load_state_dict(state.get("spikes", {}))
        if not restarts_data(differences):
            self.loader.load_state_dict(state["loader"])

    def show_receipts(self) -> None:
        """What the compile stage did, now that it is done."""
        if self.trial is not None:
            self.receipts = self.trial.receipts[self.trial.chosen]
        if self.pipeline is not None:
            mine = [dataclasses.replace(receipt, pp_rank=self.mesh["pp"].get_local_rank()) for receipt in self.receipts]
            everyone: list[list[Receipt]] = [[]] * self.mesh["pp"].size()
            dist.all_gather_object(everyone, mine, self.mesh.get_group("pp"))
            self.receipts = [receipt for theirs in everyone for receipt in theirs]
        if self.rank == 0 and self.receipts:
            for line in (*(self.trial.describe() if self.trial else ()), *describe(self.receipts)):
                logger.info(line)
            write_receipts(self.receipts, self.dump_folder)
            write_timelines(self.receipts, self.dump_folder)

    def finish(self, how: str) -> None:
        """A summary; where nobody is in a hurry the loss picture, and how the plan of the run was met; the processes part."""
        self.metrics.close()
        planned = self.hold_plan_to_account() if how == "done" else []
        if self.rank != 0:
            return
        try:
            if how == "done":
                draw_loss(self.dump_folder)
        except OSError as error:
            logger.warning(f"no loss curve: {self.dump_folder} cannot be written: {error.strerror}")
        ending = end_lines(
            self.dump_folder,
            how,
            step=self.step,
            tokens=self.tokens_seen,
            skipped=self.skipped_steps,
            left_out=self.left_out.summary(),
            receipts=self.receipts,
            steps_on_disk=self.checkpointer.steps() if self.config.checkpoint.enable else (),
        )
        for line in (*planned, *ending):
            logger.info(line, extra={"event": how} if line == ending[0] and how == "done" else {})

    def hold_plan_to_account(self) -> list[str]:
        dtype = getattr(torch, self.config.training.mixed_precision_param)
        shapes = Shapes(self.model_config, self.layout.sequences, len(self.positions), self.mesh["tp"].size(), dtype)
        with self.watchdog.within("comparing with the plan", "init_timeout_seconds"):
            return self.plan_vs_actual.close(self.machine, shapes, peak_memory_gib(self.device))


def init_device(config: Config) -> torch.device:
    """This rank's GPU, or the CPU with a fair share of its cores; seeds and determinism set."""
    torch.manual_seed(config.debug.seed)
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    return torch.device("cpu")
