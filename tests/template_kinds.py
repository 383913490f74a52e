"""Chat templates of the kinds that are published, written small, each with a byte-level tokenizer of its tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim "
    "+ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content -%}{%- set reasoning = m.reasoning_content or '' -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
GPT_OSS = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.thinking and loop.last -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
{%- else -%}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
FORGETFUL = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content if m.role == 'user' else '') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KINDS: dict[str, tuple[str, tuple[str, ...], str, str | None]] = {
    "chatml": (CHATML, CHATML_TOKENS, "<|im_end|>", None),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>"),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>"),
    "qwen3": (QWEN3, CHATML_TOKENS, "<|im_end|>", None),
    "gpt-oss": (
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|return|>",
        None,
    ),
    "marked": (MARKED, CHATML_TOKENS, "<|im_end|>", None),
    "deepseek-r1": (DEEPSEEK_R1, ("<|begin|>", "<|User|>", "<|Assistant|>", "<|eos|>"), "<|eos|>", "<|begin|>"),
    "phi3": (PHI3, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), "<|endoftext|>", None),
    "endless": (ENDLESS, CHATML_TOKENS, "<|im_end|>", None),
    "forgetful": (FORGETFUL, CHATML_TOKENS, "<|im_end|>", None),
}
"""Template, special tokens, EOS and BOS of each kind."""


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges newlines, as published ones do, and adds BOS by itself where the kind has one."""
    template, specials, eos, bos = KINDS[kind]
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("t", "h"), ("th", "e")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer
