"""The target answers the prompts itself, here or on a server: on-policy rows are worth the most.

Every answer is kept as ids in a log as it arrives. Interrupted, the same command asks only what is not answered yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from data.errors import BadInput, Failure
from data.layout import Layout, part_name
from data.manifest import State, file_record, fingerprint, publish, read_json, read_manifest, write_bytes
from data.provenance import refuse, stale_prompts
from data.settings import Run, load_run
from data.shaping import shaping

if TYPE_CHECKING:
    from data.accounting import Accounting
    from data.answers import AnswerLog, Reply
    from data.conversations import Rejected
    from pipeline.dialogue import Dialogue
    from pipeline.job import Job

SYNC_EVERY = 64
"""Answers between two moments at which the log is made durable."""
REPEATED = "answer_repeated"
"""Noted of an answer that is an earlier one of its prompt again: of a low temperature, or a server without seeds."""

Answerer = Any
"""Called with the open dialogues of one round: yields (key, Reply) or (key, reason) in any order."""


@click.command("regenerate")
@click.argument("run_file", type=click.Path())
@click.option("--part", type=click.IntRange(min=0), help="This part only; all parts, one after the other, without it.")
def command(run_file: str, part: int | None) -> None:
    """Let the target answer the prompts that prepare has written."""
    run = load_run(run_file)
    if run.data.responses == "keep":
        raise BadInput(f"{run_file}: data.responses is `keep`: prepare has written the tokens, nothing to regenerate")
    if part is not None and part >= run.extract.parts:
        raise BadInput(f"--part {part}: this run has parts 0 to {run.extract.parts - 1} (extract.parts)")
    from pipeline.job import job

    wanted = range(run.extract.parts) if part is None else [part]
    label = "" if part is None else part_name(part)
    gpus = 0 if run.data.regenerate.server else run.target.gpus
    with job(run, "regenerate", label, gpus) as work:
        todo = [Regeneration(run, number, work) for number in wanted]
        todo = [each for each in todo if not each.current()]
        if not todo:
            return
        answer, tokenizer = server_answers(run, work) if run.data.regenerate.server else local_answers(run, work)
        for each in todo:
            each.make(answer, tokenizer)


class Regeneration:
    """The stage at work on one part."""

    def __init__(self, run: Run, part: int, work: Job) -> None:
        self.run, self.part, self.work = run, part, work
        layout = Layout.of(run)
        self.manifest = layout.tokens(part)
        self.prompts = layout.prompts(part)
        self.log = self.manifest.with_name(f".{part_name(part)}.answers.jsonl")
        self.state = State(layout.tokens_state(part))
        self.source = read_manifest(self.prompts, "prompts")
        refuse(stale_prompts(run, part, self.source))
        self.shape = {"settings": json.loads(shaping(run, "regenerate")), "prompts": self.source["fingerprint"]}
        self.wanted = fingerprint(self.shape)

    def current(self) -> bool:
        """Whether the part's manifest is there and made from these prompts and settings."""
        self.state.recover(self.manifest)
        if not self.manifest.exists():
            return False
        return read_json(self.manifest, "delete it and regenerate again").get("made_from") == self.wanted

    def make(self, answer: Answerer, tokenizer: Any) -> None:
        from data.answers import AnswerLog
        from pipeline.preparer import Preparer

        if self.state.forced(self.manifest):
            self.log.unlink(missing_ok=True)
        self.manifest.unlink(missing_ok=True)
        self.state.running(wanted=self.wanted)
        preparer = Preparer(tokenizer, self.run.data)
        with AnswerLog(self.log, self.wanted) as log:
            dialogues, failed = self.ask(preparer, answer, log)
        self.publish(preparer, dialogues, failed, log)
        self.state.done(self.manifest, wanted=self.wanted)
        self.log.unlink()

    def ask(
        self, preparer: Any, answer: Answerer, log: AnswerLog
    ) -> tuple[list[tuple[Any, Dialogue]], dict[str, Rejected]]:
        """Put all questions, round by round: first turns, second turns, ... Returns dialogues, and reasons by row id of
        those that failed."""
        from data.parts import each_answer, read_prompts
        from pipeline.console import Progress
        from pipeline.dialogue import Dialogue

        prompts = each_answer(read_prompts(self.prompts.with_suffix(".parquet")), self.run.data.regenerate.answers)
        dialogues = [(prompt, Dialogue(preparer.template, prompt, self.run.data)) for prompt in prompts]
        failed: dict[str, Rejected] = {}
        turns = sum(len(dialogue.waiting) for _, dialogue in dialogues)
        with Progress(turns, f"regenerate {part_name(self.part)}", unit="answers", done=len(log.replies)) as bar:
            open_ = [dialogue for _, dialogue in dialogues]
            while open_ := [each for each in open_ if each.row_id not in failed and asks(each, failed)]:
                by_key = {each.key: each for each in open_}
                self.round(by_key, answer, log, failed, bar)
                for key, each in by_key.items():
                    if each.row_id not in failed:
                        take(each, log.replies[key], failed)
        return dialogues, failed

    def round(
        self, by_key: dict[str, Dialogue], answer: Answerer, log: AnswerLog, failed: dict[str, Rejected], bar: Any
    ) -> None:
        """One question of each dialogue; replies go to the log."""
        from data.conversations import Rejected

        for number, (key, reply) in enumerate(answer(by_key, log.replies), 1):
            if isinstance(reply, str):
                failed[by_key[key].row_id] = Rejected("server", reply)
            else:
                log.add(key, reply)
            bar.advance(1, note=f"{len(failed)} failed" if failed else None)
            if number % SYNC_EVERY == 0:
                log.sync()
            self.work.check_stop()
        log.sync()

    def publish(
        self, preparer: Any, dialogues: list[tuple[Any, Dialogue]], failed: dict[str, Rejected], log: AnswerLog
    ) -> None:
        """Write the part's token rows in hash order and its manifest."""
        from data.conversations import Rejected
        from data.spill import piece_id
        from data.tokens import TokenRow, row_hash

        rows: list[TokenRow] = []
        dropped: list[dict[str, str]] = []
        notes: list[tuple[str, bool, str, list[str]]] = []
        said: set[tuple[bytes, ...]] = set()
        for prompt, dialogue in dialogues:
            said = said if prompt.number else set()
            try:
                if prompt.row_id in failed:
                    raise failed[prompt.row_id]
                made = [preparer.fitted(row) for row in dialogue.rows()]
            except Rejected as error:
                place = {"row_id": prompt.row_id, "place": prompt.source}
                dropped.append({**place, "reason": error.reason, "detail": error.detail})
                continue
            for row in made:
                name = piece_id(prompt.row_id, -1 if row.turn is None else row.turn)
                rows.append(TokenRow(name, row.ids, row.supervised, row.finished, prompt.validation, prompt.source))
            keys = (f"{prompt.row_id}@{turn}" for turn in range(dialogue.turn + 1))
            again = ["retokenised" for key in keys if key in log.replies and log.replies[key].retokenised]
            answer = tuple(row.ids.tobytes() for row in made)
            again += [REPEATED] * (answer in said)
            said.add(answer)
            notes.append((prompt.row_id, prompt.validation, prompt.source, [*dialogue.notes, *again]))
        rows.sort(key=lambda row: row_hash(row.row_id))
        self.check(dropped, len(dialogues))
        self.write(preparer, rows, notes, dropped)

    def check(self, dropped: list[dict[str, str]], total: int) -> None:
        """List what was dropped; refuse when that is too much."""
        listed = self.manifest.with_name(f"{part_name(self.part)}.dropped.jsonl")
        write_bytes(listed, "".join(f"{json.dumps(row, sort_keys=True)}\n" for row in dropped).encode())
        if len(dropped) > self.run.data.max_dropped * total:
            raise Failure(
                f"{part_name(self.part)}: {len(dropped)} of {total} rows dropped, more than data.max_dropped "
                f"{self.run.data.max_dropped:g}; first: {dropped[0]['reason']} {dropped[0]['detail'][:200]}; each is "
                f"listed in {listed}; answers so far are kept: the same command asks for the others only"
            )

    def write(
        self,
        preparer: Any,
        rows: list[Any],
        notes: list[tuple[str, bool, str, list[str]]],
        dropped: list[dict[str, str]],
    ) -> None:
        import hashlib

        from data.parts import count_tokens, digest_rows
        from data.tokens import token_table, write_tokens
        from pipeline.console import say
        from pipeline.examples import example

        table_path = self.manifest.with_suffix(".parquet")
        write_tokens(table_path, rows)
        account = self.account(notes, dropped)
        table = token_table(rows)
        count_tokens(account, table)
        digest = hashlib.sha256()
        digest_rows(digest, table)
        body = {
            **account.body(),
            "fingerprint": fingerprint({"made_from": self.wanted, "digest": digest.hexdigest()}),
            "made_from": self.wanted,
            "settings": self.shape["settings"],
            "digest": digest.hexdigest(),
            "files": [file_record(table_path, table_path.parent)],
            "inputs": {"prompts": self.source["fingerprint"]},
            "example": example(table_path, preparer.tokenizer),
            **preparer.template.record(),
        }
        publish(self.manifest, "tokens", body)
        if (answers := self.run.data.regenerate.answers) > 1:
            prompts, repeated = self.source["counts"]["kept"], account.notes[REPEATED]
            say(
                f"{part_name(self.part)}: {prompts} prompts, {answers} answers each; {repeated} answers repeat an "
                "earlier one of their prompt"
            )
        for line in account.lines():
            say(f"{part_name(self.part)}: {line}")

    def account(self, notes: list[tuple[str, bool, str, list[str]]], dropped: list[dict[str, str]]) -> Accounting:
        """Where all answers that were asked for have come to."""
        import pyarrow as pa

        from data.accounting import Accounting

        account = Accounting()
        account.drop(row["reason"] for row in dropped)
        names, held_out, sources, noted = zip(*notes, strict=True) if notes else ((), (), (), ())
        columns = {
            "row_id": pa.array(names, pa.string()),
            "held_out": pa.array(held_out, pa.bool_()),
            "source": pa.array(sources, pa.string()),
            "notes": pa.array(noted, pa.list_(pa.string())),
        }
        account.keep_conversations(pa.table(columns))
        asked = self.source["counts"]["kept"] * self.run.data.regenerate.answers
        assert account.rows_in == asked, f"{asked} answers asked for, {account.rows_in} accounted for"
        return account


def asks(dialogue: Dialogue, failed: dict[str, Rejected]) -> bool:
    """Whether a dialogue has a question open now; one whose template refuses has failed."""
    from data.conversations import Rejected

    try:
        return dialogue.question() is not None
    except Rejected as error:
        failed[dialogue.row_id] = error
        return False


def take(dialogue: Dialogue, reply: Reply, failed: dict[str, Rejected]) -> None:
    """Give a dialogue its reply; one whose mask cannot be derived has failed."""
    from data.conversations import Rejected

    try:
        dialogue.answer(reply.ids, reply.finished)
    except Rejected as error:
        failed[dialogue.row_id] = error


def local_answers(run: Run, work: Job) -> tuple[Answerer, Any]:
    """The target on this machine: many answers in flight over a static cache."""
    from data.answers import Reply
    from pipeline.decode import Engine, Prompt, stop_ids
    from pipeline.sampling import Sampling
    from pipeline.target import load_target
    from pipeline.template import template_of

    plan = run.data.regenerate
    target = load_target(run, work.device)
    end = template_of(target.tokenizer, run.data.template_arguments).end_of_turn()
    ends = tuple(sorted({*stop_ids(target), end}))
    sampling = Sampling(plan.temperature, plan.top_p, plan.top_k, plan.seed)

    def answer(open_: dict[str, Dialogue], known: dict[str, Reply]) -> Iterator[tuple[str, Reply]]:
        longest = max(len(each.ids) + each.room() for each in open_.values())
        batch = batch_size(run, target, longest)
        engine = Engine(target, None, batch_size=batch, max_length=longest, sampling=sampling, stop_ids=ends)
        for group in groups(list(open_), batch, target.device.type == "cpu"):
            if all(key in known for key in group):
                continue
            asked = [key for key in group if key not in known or target.device.type == "cpu"]
            prompts = [Prompt(key, open_[key].ids, open_[key].room()) for key in asked]
            prompts.sort(key=lambda prompt: -len(prompt.ids))
            for made in engine.generate(prompts, plan.max_new_tokens):
                if made.id not in known:
                    yield made.id, Reply(made.ids, made.finished)

    return answer, target.tokenizer


def groups(keys: list[str], batch: int, small: bool) -> Iterator[list[str]]:
    """Questions that go to the engine together. On a CPU groups are small and redone whole after a kill, so that a
    resumed run computes the same bits; on a GPU one group keeps it full to the end."""
    size = 4 * batch if small else max(len(keys), 1)
    for first in range(0, len(keys), size):
        yield keys[first : first + size]


def batch_size(run: Run, target: Any, length: int) -> int:
    """Answers in flight, each of up to `length` tokens with its prompt."""
    wanted = run.data.regenerate.batch_size
    if wanted != "auto":
        return wanted
    if target.device.type == "cpu":
        return 16
    import torch

    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * heads * width * target.dtype.itemsize * (length + 64)
    free, _ = torch.cuda.mem_get_info(target.device)
    return int(min(1024, max(8, free // 2 // row // 8 * 8)))


def server_answers(run: Run, work: Job) -> tuple[Answerer, Any]:
    """An OpenAI-compatible server."""
    from pipeline.server_answers import AnsweringServer, Question
    from pipeline.target import load_tokenizer
    from pipeline.template import template_of

    tokenizer = load_tokenizer(run)
    template = template_of(tokenizer, run.data.template_arguments)
    end = template.end_of_turn()
    plan = run.data.regenerate
    assert plan.server is not None
    ends = template.encoder.specials  # a checkpoint may name more than its template prints
    client = AnsweringServer(plan.server, plan, template.encode, tuple(ends), end, len(tokenizer))

    def answer(open_: dict[str, Dialogue], known: dict[str, Reply]) -> Iterator[tuple[str, Reply | str]]:
        asked = ((key, each) for key, each in open_.items() if key not in known)
        questions = (Question(key, each.ids, each.room(), plan.seed + each.number) for key, each in asked)
        return client.answers(questions, work.check_stop)

    return answer, tokenizer
