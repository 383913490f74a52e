"""The report page's section on rows and cache: what was read, kept and dropped, and what the target makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from data.settings import Data
from pipeline.figures import amount
from pipeline.page_parts import figure, share, table
from pipeline.report import Body, Story


def data_section(story: Story, pictures: Mapping[str, str]) -> str:
    counts = [("prompts", story.prompts), ("token rows", story.tokens and story.tokens["counts"])]
    if story.cache is not None:
        counts.append(("cache", story.cache.counts))
    rows = [
        [escape(what), ", ".join(_count(key, value) for key, value in body.items())] for what, body in counts if body
    ]
    shown = (table(("what", "counts"), rows) if rows else "") + _account(story.account)
    if story.cache is not None:
        cache = story.cache
        taps = ", ".join(map(str, cache.layers))
        shown += _on_policy(cache.on_policy, story.run.data) + (
            f"<h3>States</h3><p>Of layers {taps}, width {cache.width}, codec {escape(cache.codec)}, "
            f"compressor {escape(cache.compressor)}. What the states take under each codec:</p>"
            + figure(pictures, "codecs")
        )
    return shown + _row_example(story.tokens)


def _on_policy(found: Body, settings: Data) -> str:
    """How much of what is learned the target would say itself, and what the rest is by where the answers come from."""
    if found["share"] is None:
        return ""
    temperature = settings.regenerate.temperature
    rest = "teaches drafts that it will not accept"
    if settings.responses == "keep":
        rest += " (<code>data.responses: regenerate</code> lets it answer itself)"
    elif temperature:
        rest = (
            f"it drew itself, at temperature {temperature:g}: drafts that it accepts where it is sampled so, as often "
            "as it would draw them, and not where it decodes greedily"
        )
    return (
        f"<h3>On-policy</h3><p><b>{share(found['share'])}</b> of the supervised tokens are what the target itself is "
        f"likeliest to say there, of {found['tokens']:,} tokens of {found['rows']:,} rows that it was asked for. The "
        f"rest {rest}.</p>"
    )


def _account(account: Body | None) -> str:
    """What became of the rows: dropped, noted, repeated, asked by a benchmark too, and how long they are."""
    if account is None:
        return ""
    counts = account["counts"]
    rows = [["rows read", f"{counts['rows_in']:,}"]]
    if "answers" in counts:
        rows.append(["answers asked for, several a prompt", f"{counts['answers']:,}"])
    rows.append(["kept", f"{counts['kept']:,}"])
    rows += [[f"dropped: {escape(_words(reason))}", f"{count:,}"] for reason, count in account["dropped"].items()]
    rows += [[f"noted: {escape(_words(note))}", f"{count:,}"] for note, count in account["notes"].items()]
    rows += [[f"repeats: {escape(_words(kind))}", f"{count:,}"] for kind, count in account["repeats"].items()]
    alone = account.get("compared_alone", {})  # which older runs did not count
    rows += [[f"not compared with rows of messages: {escape(_words(name))}", f"{n:,}"] for name, n in alone.items()]
    for name, found in account["contamination"].items():
        ids = f" ({escape(', '.join(found['ids'][:3]))}, ...)" if found["ids"] else ""
        rows.append([f"asked by benchmark {escape(name)} too{ids}", f"{found['rows']:,}"])
    rows += [[f"{low:,} to {2 * low - 1:,} tokens", f"{count:,}"] for low, count in account["lengths"]]
    return "<h3>What became of the rows</h3>" + table(("what", "rows"), rows, right=(1,))


def _words(key: str) -> str:
    return key.replace("_", " ")


def _count(key: str, value: int) -> str:
    return amount(value) if key == "bytes" else f"{value:,} {escape(key.replace('_', ' '))}"


def _row_example(tokens: Body | None) -> str:
    """One training row; what is learned is marked."""
    pieces = ((tokens or {}).get("example") or {}).get("pieces")
    if not pieces:
        return ""
    text = "".join(f'<span class="a">{escape(part)}</span>' if learned else escape(part) for part, learned in pieces)
    note = '<h3>One training row</h3><p class="note">Supervised tokens are marked.</p>'
    return f'{note}<div class="talk"><div class="answer">{text}</div></div>'
